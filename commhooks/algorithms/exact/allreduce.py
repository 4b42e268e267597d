"""Exact average, as without a hook. Wire: one all-reduce of the gradients.

::

    all_reduce(gradients / size)
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.base import CommHook
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from reducer import GradBucket
from reducer.native import AverageHook, NativeHook

__all__ = ["AllReduce"]


@register_hook("allreduce")
@dataclass
class AllReduce(CommHook):
    """Average exactly, in the gradients' own dtype."""

    capturable = True
    lossless = True
    tells_contribution = True
    state_fields = no_state
    wire = "one all-reduce of the gradients"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        # Divide first, so that sums of large half-precision numbers do not overflow.
        share = bucket.buffer().div_(comm.size)
        comm.contribute(share)
        return await comm.all_reduce(share)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        return all_reduce_bytes(bucket.buffer().nbytes, size)

    def native(self, group: dist.ProcessGroup) -> NativeHook:
        return AverageHook(group)
