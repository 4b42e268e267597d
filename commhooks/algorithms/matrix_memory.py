"""What low-rank compression remembers from step to step, by parameter name.

The hook's ``state`` holds one entry per key: ``state[key][field]`` with the fields ``error``,
``left`` and ``right``. All matrices of a batch are multiplied at once, so their entries are views
of one tensor here. When the buckets are cut anew, new batches take over what the entries hold.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from commhooks.algorithms.matrix_plan import MatrixBatch, Piece, Side
from commhooks.errors import CommHookStateError

__all__ = ["MatrixMemory", "State", "check_state", "draw_factors"]

State = dict[str, dict[str, Tensor]]
_FIELDS = ("error", *(side.name.lower() for side in Side))


class MatrixMemory:
    """The error memory and the warm-start factors of one batch of matrices.

    ``error``: (k, n, m), zero at first; None without error feedback. ``factors``: the last factors
    of each of ``sides``, random at first.
    """

    def __init__(
        self,
        batch: MatrixBatch,
        state: State,
        *,
        sides: Iterable[Side],
        error_feedback: bool,
        seed: int,
        like: Tensor,
    ) -> None:
        self.batch = batch
        self.error: Tensor | None = None
        if error_feedback:
            elements = max(piece.stop for piece in batch.error_pieces)
            memory = like.new_zeros(elements)
            _take_over(state, "error", batch.error_pieces, memory)
            k, n, m = batch.shape
            self.error = memory[: k * n * m].view(batch.shape)
        self.factors: dict[Side, Tensor] = {}
        for side in sides:
            factors = draw_factors(batch, side, seed=seed, like=like)
            _take_over(state, side.name.lower(), batch.factor_pieces(side), factors)
            self.factors[side] = factors

    def keep(self, side: Side, fresh: Tensor, verdict: Tensor) -> None:
        """Stores ``fresh`` factors to start from, except for vectors that came out as zero.

        None if the verdict, () bool, is false.

        A matrix of zeros, or of lower rank than r, has factors with vectors of zeros, from which no
        later step could find a direction again: there the old vectors stay.
        """
        if side in self.factors:
            alive = (fresh != 0).any(dim=-2 if side is Side.LEFT else -1, keepdim=True)
            self.factors[side].copy_(torch.where(alive & verdict, fresh, self.factors[side]))


def draw_factors(
    batch: MatrixBatch, side: Side, *, seed: int, like: Tensor, step: int = 0
) -> Tensor:
    """Random factors, which depend on ``seed``, ``step``, side and key only.

    So they are the same on all ranks and devices, however parameters are put into buckets.
    """
    drawn = torch.empty(batch.factor_shape(side))
    for key, matrix in zip(batch.factor_keys, drawn, strict=True):
        digest = hashlib.sha256(f"{seed}/{step}/{side.name}/{key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        matrix.normal_(generator=generator)
    if like.is_cuda:
        drawn = drawn.pin_memory()  # or the host would wait for the copy
    return drawn.to(like, non_blocking=True)


def check_state(state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raises CommHookStateError unless these are finite tensors under the names that we give.

    Their shapes are checked when the parameters' are known, by the first step that uses them.
    """
    for key, entry in state.items():
        for field, tensor in entry.items():
            if field not in _FIELDS:
                raise CommHookStateError(
                    f"state of {key!r}: expected some of {_FIELDS}, found {field!r}. It is the "
                    "state of another hook."
                )
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise CommHookStateError(
                    f"state of {key!r}: expected {field!r} to hold finite numbers, found others. "
                    "The file is damaged: load an earlier one, or begin without a state."
                )


def _take_over(state: State, field: str, pieces: Sequence[Piece], memory: Tensor) -> None:
    """Copies ``state[key][field]`` of all pieces into ``memory``, and makes them views of it."""
    flat = memory.view(-1)
    for piece in pieces:
        view = flat[piece.start : piece.stop].view(piece.shape)
        entry = state.setdefault(piece.key, {})
        if field in entry:
            if entry[field].shape != view.shape:
                raise CommHookStateError(
                    f"state of {piece.key!r}: expected {field!r} of shape {tuple(view.shape)}, "
                    f"found {tuple(entry[field].shape)}. It was saved with another rank or for "
                    "another model: load a state that fits, or register a new hook to begin "
                    "without one."
                )
            view.copy_(entry[field])
        entry[field] = view
