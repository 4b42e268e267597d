"""No communication. Wire: nothing."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from reducer import GradBucket
from reducer.native import NativeHook, NoopHook

__all__ = ["Noop"]


@register_hook("noop")
@dataclass
class Noop(CommHook):
    """Send nothing: each rank keeps its own gradients. Measures all costs but communication."""

    capturable = True
    consensus = False
    state_fields = no_state
    wire = "nothing"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:  # noqa: ARG002
        return bucket.buffer()

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:  # noqa: ARG002
        return 0

    def collectives(self, rank: int, size: int) -> dict[tuple[int, ...], int]:  # noqa: ARG002
        return {}

    def native(self, group: dist.ProcessGroup) -> NativeHook:  # noqa: ARG002
        return NoopHook()
