"""What low-rank compression remembers from step to step, by parameter name.

The hook's ``state`` holds one entry per key: ``state[key][field]`` with the fields ``error``,
``left`` and ``right``. All matrices of a bucket are worked on together, so their entries are views
of one tensor here. When the buckets are cut anew, new ones take over what the entries hold.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan, Piece, Side
from commhooks.algorithms.lowrank.payload import Payload
from commhooks.errors import CommHookStateError

__all__ = ["MatrixMemory", "State", "check_state", "draw_factors"]

State = dict[str, dict[str, Tensor]]
_FIELDS = ("error", *(side.name.lower() for side in Side))


class MatrixMemory:
    """The error memory and the warm-start factors of the matrices of a bucket.

    ``error``: flat, zero at first; None without error feedback. ``errors``: views of it, those of
    each batch, (k, n, m); ``error_starts``: where these begin. ``factors``: the last factors of
    each of ``sides``, random at first.
    """

    def __init__(
        self,
        plan: MatrixPlan,
        state: State,
        *,
        sides: Iterable[Side],
        error_feedback: bool,
        seed: int,
        like: Tensor,
    ) -> None:
        self.error: Tensor | None = None
        self.errors: list[Tensor | None] = [None] * len(plan.batches)
        self.error_starts = _starts(plan)
        if error_feedback:
            self.error = like.new_zeros(self.error_starts[-1])
            for i, batch in enumerate(plan.batches):
                memory = self.error[self.error_starts[i] :]
                _take_over(state, "error", batch.error_pieces, memory)
                self.errors[i] = memory[: math.prod(batch.shape)].view(batch.shape)
        self.factors: dict[Side, Payload] = {}
        for side in sides:
            factors = draw_factors(plan, side, seed=seed, like=like)
            for batch, memory in zip(plan.batches, factors.factors, strict=True):
                _take_over(state, side.name.lower(), batch.factor_pieces(side), memory)
            self.factors[side] = factors


def _starts(plan: MatrixPlan) -> list[int]:
    """Where the errors of each batch begin, and the end of all."""
    starts = [0]
    for batch in plan.batches:
        starts.append(starts[-1] + max(piece.stop for piece in batch.error_pieces))
    return starts


def draw_factors(
    plan: MatrixPlan, side: Side, *, seed: int, like: Tensor, step: int = 0
) -> Payload:
    """Random factors, which depend on ``seed``, ``step``, side and key only.

    So they are the same on all ranks and devices, however parameters are put into buckets.
    """
    drawn = Payload.empty(plan, side, has_exact=False, like=torch.empty(0))
    for batch, factors in zip(plan.batches, drawn.factors, strict=True):
        for key, matrix in zip(batch.factor_keys, factors, strict=True):
            digest = hashlib.sha256(f"{seed}/{step}/{side.name}/{key}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            matrix.normal_(generator=generator)
    flat = drawn.flat
    if like.is_cuda:
        flat = flat.pin_memory()  # or the host would wait for the copy
    return Payload(plan, side, flat.to(like, non_blocking=True), has_exact=False)


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
