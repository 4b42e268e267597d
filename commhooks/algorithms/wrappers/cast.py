"""Run another hook in another precision::

result = inner(gradient.to(dtype)).to(gradient.dtype)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookOptionError
from commhooks.hook.base import CommHook
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.options import hook_default
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from commhooks.precision import saturating_cast
from reducer import GradBucket

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@register_hook("cast")
@dataclass
class Cast(CommHook):
    """Pass gradients to the inner hook in another dtype and convert its average back.

    In a narrower dtype the inner hook sends fewer bytes; in a wider one it computes more exactly.
    Numbers beyond the range of ``dtype`` become infinite on all ranks. Inside ``error_feedback``
    they are clamped to half of the range instead, and the rest is sent later.

    Memory: a copy of the bucket in ``dtype`` until its average has arrived.

    Raises:
        CommHookOptionError: collectives cannot add numbers of ``dtype``.
    """

    inner: CommHook = hook_default("allreduce")
    """The hook that runs on buckets in ``dtype``."""
    dtype: torch.dtype = torch.bfloat16
    """float16, bfloat16, float32 or float64."""

    capturable_from = 0
    tells_contribution = True
    state_fields = no_state
    wire = "what the inner hook sends for gradients of that dtype"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in _DTYPES:
            names = ", ".join(str(dtype) for dtype in _DTYPES)
            raise CommHookOptionError(
                f"option 'dtype' of hook {self.name!r}: expected one of {names}, found {self.dtype}"
            )

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        nested = comm.within(self.inner, wants_contribution=comm.wants_contribution)
        cast = self._cast(bucket, is_fed_back=comm.wants_contribution)
        average = await self.inner.reduce(cast, nested)
        comm.contribution = nested.contribution
        return bucket.buffer().copy_(average.view(-1))

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        return self.inner.wire_bytes(self._cast(bucket), size)

    def _cast(self, bucket: GradBucket, *, is_fed_back: bool = False) -> GradBucket:
        buffer = bucket.buffer()
        if is_fed_back:
            # The factor 2 leaves room for rounding up.
            cast = saturating_cast(buffer, self.dtype, headroom=2)
        else:
            cast = buffer.to(self.dtype)
        return bucket_with(bucket, cast)
