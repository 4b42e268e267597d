"""Base class of hooks under which each rank has a model of its own."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commhooks.algorithms.bucket_parameters import pack, parameters_of, pieces, unpack
from commhooks.algorithms.host_copy import HostCopy
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.base import CommHook
from commhooks.precision import at_least_float32
from reducer import GradBucket


@dataclass
class WithoutConsensus(CommHook):
    """A hook under which models differ between ranks, with a metric of how far they do.

    ``consensus_distance`` is ‖x_i - mean‖₂, the norm of the difference between this rank's
    parameters and their mean over all ranks, in the last step in which parameters were sent. It is
    exact if that step computed the mean; DiLoCo with a delay samples it. If the rank had the
    parameters of one partner only, it is an estimate, exact with two ranks; with more, its square,
    averaged over all ranks, has the right expectation over random partners, while that of a single
    rank may be off with every partner.
    """

    consensus = False
    gets_each_once = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._measured_step = -1
        # One of each bucket. On the host, because an exchange may measure while metrics are read.
        self._squares: list[HostCopy] = []

    def measure(
        self, step: int, differences: Iterable[Sequence[Tensor]], *, ranks_if_partner: int = 0
    ) -> None:
        """Add one bucket's differences from the mean, or from a partner.

        ``differences``: lists of tensors, of which one at a time is in memory.
        ``ranks_if_partner``: the number of ranks, if it is from a partner.
        """
        norms = list[Tensor]()
        for some in differences:
            norms += torch._foreach_norm(list(some), dtype=at_least_float32(some[0].dtype))  # noqa: SLF001
        square = torch.stack(norms).double().square().sum()
        if ranks_if_partner:
            # Mean over pairs of ‖x_i - x_j‖² = 2·N/(N-1) · mean over ranks of ‖x_i - mean‖².
            square *= (ranks_if_partner - 1) / (2 * ranks_if_partner)
        if step != self._measured_step:
            self._measured_step, self._squares = step, []
        self._squares.append(HostCopy(square))

    async def mean_of(self, parameters: Sequence[Tensor], step: int, comm: Communicator) -> Tensor:
        """Return the mean of parameters over the ranks, flat, in at least float32. Measures."""
        own = pack(parameters)
        own = own.to(at_least_float32(own.dtype))
        mean = await comm.all_reduce(own.div_(comm.size))
        pairs = pieces(parameters, unpack(mean, parameters))
        self.measure(step, (torch._foreach_sub(*pair) for pair in pairs))  # noqa: SLF001
        return mean

    def mean_bytes(self, bucket: GradBucket, size: int) -> int:
        """Return the bytes that :meth:`mean_of` sends for all parameters of a bucket."""
        parameters = parameters_of(bucket)
        sent = sum(each.numel() * at_least_float32(each.dtype).itemsize for each in parameters)
        return all_reduce_bytes(sent, size)

    def recover(self) -> None:
        super().recover()
        self._measured_step = -1  # the step is repeated

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._measured_step = -1

    def metrics(self) -> dict[str, float]:
        """Return ``consensus_distance`` once it has been measured."""
        own = {}
        if squares := self._squares:
            own["consensus_distance"] = math.sqrt(sum(square.read() for square in squares))
        return own | super().metrics()
