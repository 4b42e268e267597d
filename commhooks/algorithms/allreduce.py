"""The plain average. Wire: one all-reduce of the gradients."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from commhooks.communicator import Communicator
from commhooks.hook import CommHook
from commhooks.registry import register_hook
from reducer import GradBucket
from reducer._C import AverageHook, NativeHook

__all__ = ["AllReduce"]


@register_hook("allreduce")
@dataclass
class AllReduce(CommHook):
    """Average exactly, in the gradients' own dtype."""

    lossless = True
    wire = "one all-reduce of the gradients"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        # Divided first, so that sums of large half-precision numbers do not overflow.
        return await comm.all_reduce(bucket.buffer().div_(comm.size))

    def native(self, group: dist.ProcessGroup) -> NativeHook:
        return AverageHook(group)
