"""allreduce, fp16, bf16 and noop: exact averages, up to rounding, and no communication.

::

    all_reduce(gradients / size)                                                   # allreduce
    all_reduce((gradients / size).to(float16 or bfloat16)).to(gradients.dtype)     # fp16, bf16
    gradients                                                                      # noop

``two_shot`` sums in float32 what ranks send in half precision. Part r belongs to rank r of N::

    received = all_to_all((gradients / N).to(half).split(n / N))
    all_gather(sum(part.to(float32) for part in received).to(half)).to(gradients.dtype)

Gradients are divided by the number of ranks first, so that the sum stays in range if the gradients
do. In float16, numbers beyond 65504 become infinite on all ranks, as a gradient scaler expects;
bfloat16 has the range of float32, and 2 digits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from commhooks.algorithms.bucket_memory import PerBucketCache, part_length, part_of
from commhooks.codecs.rounding import bits_of, round_stochastically
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.base import CommHook
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from commhooks.kernels import require_for
from commhooks.precision import scaled_cast
from reducer import GradBucket
from reducer.native import AverageHook, NativeHook, NoopHook

_LARGE = 1 << 25
"""Bytes from which glibc gets memory from the system at each allocation, and returns it then. The
pages of new memory take longer than the cast."""


@register_hook("allreduce")
@dataclass
class AllReduce(CommHook):
    """Average exactly, in the gradients' own dtype."""

    capturable_from = 0
    lossless = True
    tells_contribution = True
    state_fields = no_state
    wire = "one all-reduce of the gradients"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        share = bucket.buffer().div_(comm.size)
        comm.contribute(share)
        return await comm.all_reduce(share)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        return all_reduce_bytes(bucket.buffer().nbytes, size)

    def native(self, group: dist.ProcessGroup, step: int | None = None) -> NativeHook:  # noqa: ARG002
        return AverageHook(group, name=self.name)


@dataclass
class _Half(CommHook):
    """Average in ``wire_dtype``; the base class of the hooks below."""

    wire_dtype: ClassVar[torch.dtype]

    two_shot: bool = False
    """Sum in float32 and round twice, where an all-reduce rounds the sum at each rank. Takes an
    all-to-all and an all-gather, with the same bytes."""

    stochastic = False  # without a type, or it would be an option of fp16
    tells_contribution = True
    state_fields = no_state
    wire = "one all-reduce of 2 bytes per element"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Memory for the messages of large buckets on the CPU.
        self._large: PerBucketCache[Tensor] = PerBucketCache(self)

    @property
    def capturable_from(self) -> int | None:
        return None if self.stochastic else 0

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        place = f"{bucket.key}:{comm.step}:{comm.rank}"
        sent = self._round(buffer, 1 / comm.size, self._memory(bucket), place)
        comm.contribute(sent)
        if not self.two_shot:
            return buffer.copy_(await comm.all_reduce(sent))
        total = await _sum_in_float32(sent, comm)
        average = self._round(
            total, 1.0, total.new_empty(total.shape, dtype=self.wire_dtype), f"{place}:average"
        )
        if comm.contribution is not None:
            # The second rounding of its part counts as this rank's own.
            own = comm.contribution[part_of(buffer.numel(), comm.size, comm.rank)]
            own -= comm.size * (total - average)[: own.numel()]
        gathered = await comm.all_gather(average)
        return buffer.copy_(gathered.view(-1)[: buffer.numel()])

    def _round(self, values: Tensor, scale: float, out: Tensor, place: str) -> Tensor:  # noqa: ARG002
        """Write ``scale * values`` to ``out`` in half precision. Return it."""
        return scaled_cast(values, scale, out)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        numel = bucket.buffer().numel()
        if self.two_shot:
            return 4 * (size - 1) * part_length(numel, size)
        return all_reduce_bytes(2 * numel, size)

    @property
    def rounds(self) -> int:
        return 2 if self.two_shot else 1

    def recover(self) -> None:
        """Use other memory than a failed step, whose messages may still be on their way."""
        super().recover()
        self._large.clear()

    def _memory(self, bucket: GradBucket) -> Tensor:
        """Return memory for what the bucket sends."""
        buffer = bucket.buffer()
        kept = self._large.get(bucket)
        if kept is not None and (kept.shape, kept.device) == (buffer.shape, buffer.device):
            return kept
        memory = torch.empty_like(buffer, dtype=self.wire_dtype)
        if memory.is_cpu and memory.nbytes >= _LARGE:
            self._large.put(bucket, memory)
        return memory

    def native(
        self,
        group: dist.ProcessGroup,
        step: int | None = None,  # noqa: ARG002
    ) -> NativeHook | None:
        return None if self.two_shot else AverageHook(group, self.wire_dtype, self.name)


async def _sum_in_float32(values: Tensor, comm: Communicator) -> Tensor:
    """Return the sum over ranks of this rank's part of the flat ``values``, added in float32."""
    length = part_length(values.numel(), comm.size)
    padding = comm.size * length - values.numel()
    parts = functional.pad(values, (0, padding)).view(comm.size, length)
    first, *others = await comm.all_to_all(parts)
    total: Tensor = first.float()
    for part in others:
        total += part
    return total


@register_hook("fp16")
@dataclass
class Float16(_Half):
    """Average in float16: half the bytes of float32, 3 digits, numbers up to 65504."""

    wire_dtype = torch.float16


@register_hook("bf16")
@dataclass
class Bfloat16(_Half):
    """Average in bfloat16: half the bytes of float32, 2 digits, the range of float32."""

    stochastic: bool = False
    """Round to one of the two neighbors at random, so that the expected value is the number itself.
    Sums in an all-reduce still round to nearest; with ``two_shot`` nothing does. On a GPU, CuPy is
    required."""
    seed: int = field(default=0, kw_only=True)
    """The seed of random numbers, which also depend on the rank, the step and the bucket."""

    wire_dtype = torch.bfloat16

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError if a device of the parameters cannot run the kernel."""
        super().prepare(parameters, group)
        if self.stochastic:
            require_for(parameters.values())

    def native(self, group: dist.ProcessGroup, step: int | None = None) -> NativeHook | None:
        return None if self.stochastic else super().native(group, step)

    def _round(self, values: Tensor, scale: float, out: Tensor, place: str) -> Tensor:
        if not self.stochastic:
            return super()._round(values, scale, out, place)
        return round_stochastically(values, scale, out, bits_of(f"{self.seed}:{place}"))


@register_hook("noop")
@dataclass
class Noop(CommHook):
    """Send nothing: each rank keeps its own gradients. Measures all costs but communication."""

    capturable_from = 0
    consensus = False
    rounds = 0
    state_fields = no_state
    wire = "nothing"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:  # noqa: ARG002
        return bucket.buffer()

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:  # noqa: ARG002
        return 0

    def native(self, group: dist.ProcessGroup, step: int | None = None) -> NativeHook:  # noqa: ARG002
        return NoopHook()
