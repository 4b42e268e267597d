"""How far apart the models of the ranks are."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from commhooks.hook.base import CommHook
from commhooks.precision import at_least_float32

__all__ = ["ConsensusDistance", "WithoutConsensus"]


@dataclass
class ConsensusDistance:
    """The norm of what a rank's parameters differ by from the mean over all ranks, ‖x_i - mean‖₂.

    Of the last step in which parameters were sent. Where all ranks' mean was there it is exact;
    where one partner's parameters were, it is estimated: right is the mean of the squares over all
    ranks, in expectation over all other ranks as partners, and always with two ranks. A single
    rank's may be off whoever its partner is.
    """

    _step: int = -1
    _squares: Tensor | None = None

    def add(self, step: int, difference: Tensor, *, partner_of: int = 0) -> None:
        """One bucket's difference, from the mean or, of ``partner_of`` ranks, from the partner."""
        dtype = at_least_float32(difference.dtype)
        square = torch.linalg.vector_norm(difference, dtype=dtype).square().double()
        if partner_of:
            # Mean over pairs of ‖x_i - x_j‖² = 2·N/(N-1) · mean over ranks of ‖x_i - mean‖².
            square *= (partner_of - 1) / (2 * partner_of)
        if step != self._step or self._squares is None:
            self._step, self._squares = step, torch.zeros_like(square)
        self._squares += square

    def metrics(self) -> dict[str, float]:
        """By name, for ``CommHook.metrics``; nothing before the first measurement."""
        if self._squares is None:
            return {}
        return {"consensus_distance": self._squares.sqrt().item()}


@dataclass
class WithoutConsensus(CommHook):
    """A hook under which every rank has a model of its own, and that tells how far they part."""

    _distance: ConsensusDistance = field(
        default_factory=ConsensusDistance, init=False, repr=False, compare=False
    )

    consensus = False

    def metrics(self) -> dict[str, float]:
        """``consensus_distance``, see :class:`ConsensusDistance`, of the last step that knew it."""
        return self._distance.metrics() | super().metrics()
