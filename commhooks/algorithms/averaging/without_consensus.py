"""Base class of hooks under which each rank has a model of its own."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from commhooks.hook.base import CommHook
from commhooks.precision import at_least_float32

__all__ = ["WithoutConsensus"]


@dataclass
class WithoutConsensus(CommHook):
    """A hook under which models differ between ranks, with a metric of how far they do.

    ``consensus_distance`` is ‖x_i - mean‖₂, the norm of the difference between this rank's
    parameters and their mean over all ranks, in the last step in which parameters were sent. It is
    exact if that step computed the mean. If the rank had the parameters of one partner only, it is
    an estimate, exact with two ranks; with more, its square, averaged over all ranks, has the right
    expectation over random partners, while that of a single rank may be off with every partner.
    """

    _measured_step: int = field(default=-1, init=False, repr=False, compare=False)
    _squared_distance: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    consensus = False
    gets_each_once = True

    def measure(self, step: int, difference: Tensor, *, partner_of: int = 0) -> None:
        """Add one bucket's difference from the mean or, of ``partner_of`` ranks, from a partner."""
        dtype = at_least_float32(difference.dtype)
        square = torch.linalg.vector_norm(difference, dtype=dtype).square().double()
        if partner_of:
            # Mean over pairs of ‖x_i - x_j‖² = 2·N/(N-1) · mean over ranks of ‖x_i - mean‖².
            square *= (partner_of - 1) / (2 * partner_of)
        if step != self._measured_step or self._squared_distance is None:
            self._measured_step, self._squared_distance = step, torch.zeros_like(square)
        self._squared_distance += square

    def metrics(self) -> dict[str, float]:
        """Return ``consensus_distance`` once it has been measured."""
        own = {}
        if self._squared_distance is not None:
            own["consensus_distance"] = self._squared_distance.sqrt().item()
        return own | super().metrics()
