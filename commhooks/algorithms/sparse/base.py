"""What sparse hooks share: the elements that a rank sends, their exchange, and the commit.

Each rank sends one message of bytes. Its size follows from the number of elements in the bucket and
the number of elements sent:

    | indices, see Note [Index code] in codecs/index_code.py | values, in the bucket's dtype |

With a codec, the values are its message instead: a scale per block, then the codes. The indices
take a multiple of 8 bytes, so both are aligned.

Note [Sparse commit]
~~~~~~~~~~~~~~~~~~~~
With the gradients G, the error E of earlier steps and M = G + E:

    rank i:       S_i = the selected elements of M_i; send S_i
    all ranks:    result = mean of all S_i
    rank i:       E_i = M_i - S_i

M is computed in the bucket's buffer. A non-finite element counts as larger than any number, so it
is always sent, and no separate flag has to tell the other ranks: Note [All finite] in
codecs/finite.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.sparse.selection import kept_elements, scatter_add
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.finite import is_known_false
from commhooks.codecs.index_code import IndexCode
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_gather_bytes
from commhooks.hook.base import CommHook
from commhooks.hook.options import Limits
from commhooks.hook.state import StateField
from commhooks.kernels import backend_of, require
from commhooks.kernels import sparse as kernels
from commhooks.precision import at_least_float32, saturating_cast
from reducer import GradBucket


@dataclass
class SparseHook(CommHook):
    """Base of hooks that send some elements of each bucket and can keep the others for later.

    What they keep is as large as the gradients, in float32 (float64 for float64 gradients). If an
    element of a bucket is not finite on any rank, sent or not, the bucket averages to NaN on all
    ranks and what is kept does not change: see Note [Sparse commit].
    """

    error_feedback: bool = field(default=True, kw_only=True)
    """Add what a step does not send to the next gradient. Otherwise small elements are lost."""

    keeps = "error"
    """The name, in the state, of what the hook keeps of each element."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._errors = BucketMemory(self.keeps)

    @property
    def tells_contribution(self) -> bool:
        """Whether the hook keeps no error: another error feedback would count it twice."""
        return not self.error_feedback

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Refuse parameters on a GPU if CuPy is not installed."""
        for device in {parameter.device for parameter in parameters.values()}:
            require(device)
        super().prepare(parameters, group)

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return (self._errors.field(gradient),) if self.error_feedback else ()

    def _error(self, bucket: GradBucket) -> Tensor | None:
        """Return what was not sent of a bucket, to be changed; None without error feedback."""
        return self._errors.of(bucket, self.state) if self.error_feedback else None


@dataclass
class WarmedUp(SparseHook):
    """Base of hooks that send a share of each bucket, which decreases during a warm-up."""

    density: Annotated[float, Limits(gt=0, le=1)] = 0.01
    """k as a share of the bucket's elements, after the warm-up."""
    warmup_steps: Annotated[int, Limits(ge=0)] = 200
    """Number of steps in which the density decreases exponentially from ``warmup_density``. What is
    not sent in early steps is out of date when it is sent."""
    warmup_density: Annotated[float, Limits(gt=0, le=1)] = 1.0
    """Density of the first step, unless ``density`` is higher."""

    def kept(self, bucket: GradBucket, numel: int) -> int:
        """Return how many of ``numel`` elements of a bucket are sent in its step.

        Gradients change fastest in the first steps, and what is not sent then is out of date when
        it is sent: section 3.3 of https://arxiv.org/abs/1712.01887.
        """
        density = self.density
        if bucket.step < self.warmup_steps:
            decay = math.pow(density / self.warmup_density, bucket.step / self.warmup_steps)
            density = max(density, self.warmup_density * decay)
        return kept_elements(density, numel)


def to_memory_dtype(buffer: Tensor) -> Tensor:
    """Return the same tensor in float32 or float64: a copy only if it is in half precision."""
    return buffer.to(at_least_float32(buffer.dtype))


@dataclass(frozen=True)
class SparseVector:
    """A vector of ``numel`` elements that are zero, except for ``values`` at ``indices``."""

    indices: Tensor
    """(count,) int32, ascending."""
    values: Tensor
    """(count,)."""
    numel: int

    @classmethod
    def of(cls, vector: Tensor, indices: Tensor, dtype: torch.dtype) -> "SparseVector":
        """Copy ``vector[indices]``, rounded to ``dtype`` and clamped to its range."""
        values = saturating_cast(vector.index_select(0, indices), dtype)
        return cls(indices, values, vector.numel())

    @property
    def count(self) -> int:
        """The number of values."""
        return self.indices.numel()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the vector with its zeros."""
        out = self.values.new_zeros(self.numel, dtype=dtype)
        scatter_add(self.values.to(dtype), self.indices, out)
        return out

    def subtract_from(self, vector: Tensor) -> None:
        """Compute ``vector -= self``. Exact if ``vector`` holds the unrounded values."""
        scatter_add(-self.values.to(vector.dtype), self.indices, vector)


class GatheredVectors(Protocol):
    """The sparse vectors of all ranks."""

    own: SparseVector
    """This rank's vector, as all ranks have received it."""
    all_finite: Tensor
    """() bool: whether all values, and so all elements of all ranks' buckets, are finite.

    A damaged message makes it false on a GPU; on the CPU it raises RuntimeError.
    """

    def commit(self, total: Tensor, error: Tensor | None, buffer: Tensor) -> Tensor:
        """Finish the step as Note [Sparse commit] says.

        If all values are finite, ``error`` becomes ``total`` minus this rank's vector, and
        ``buffer`` the mean over ranks, summed in the order of ranks. Otherwise ``error`` stays as
        it is and ``buffer`` becomes NaN. ``total`` may be ``buffer``; its contents are lost.
        ``buffer`` has the dtype of the values that arrived.

        Returns ``buffer``. Does not wait for the device.
        """


async def gather(
    own: SparseVector,
    counts: Sequence[int],
    comm: Communicator,
    codec: BlockCodec | None = None,
) -> GatheredVectors:
    """Exchange the sparse vectors of all ranks in one all-gather, padded to the longest.

    ``counts`` holds the number of values on each rank. If all are zero, nothing is sent. With a
    codec, which rounds the values, those that arrive are float32, or float64 if they were.
    """
    code = IndexCode.shortest(own.numel, max(counts))
    if code.count == 0:
        return _OneByOne(own, [])
    if codec is not None:
        own = replace(own, values=to_memory_dtype(own.values))
    dtype = own.values.dtype
    message = write_message(own, code)
    if codec is None:
        messages = await comm.all_gather(message)
    else:
        compact = await comm.all_gather(_quantize_values(message, code, codec, dtype))
        messages = _expand(compact, code, codec, dtype)
        received = messages[comm.rank, code.nbytes :].view(dtype)[: own.count]
        own = replace(own, values=received)
    if backend_of(messages) is not None:
        return _AllAtOnce(own, messages, code, comm.rank)
    pairs = zip(messages, counts, strict=True)
    return _OneByOne(own, [_read_message(message, code, dtype, n) for message, n in pairs])


def gather_bytes(bucket: GradBucket, count: int, size: int, codec: BlockCodec | None = None) -> int:
    """Return the bytes that each of ``size`` ranks sends to gather ``count`` elements of each."""
    buffer = bucket.buffer()
    code = IndexCode.shortest(buffer.numel(), count)
    if codec is not None and count > 0:
        return all_gather_bytes(_compact_bytes(code, codec), size)
    return all_gather_bytes(_message_bytes(code, buffer.dtype), size)


def write_message(vector: SparseVector, code: IndexCode) -> Tensor:
    """Return the message, uint8, padded with zeros to ``code.count`` values."""
    dtype = vector.values.dtype
    message = vector.indices.new_zeros(_message_bytes(code, dtype), dtype=torch.uint8)
    if backend_of(message) is not None:
        kernels.pack(vector.indices, vector.values, message, code)
        return message
    code.pack(vector.indices, out=message[: code.nbytes])
    message[code.nbytes :].view(dtype)[: vector.count] = vector.values
    return message


def _read_message(message: Tensor, code: IndexCode, dtype: torch.dtype, count: int) -> SparseVector:
    """Return the ``count`` values of a message on the CPU, as a view of it."""
    indices = code.unpack(message[: code.nbytes], count)
    return SparseVector(indices, message[code.nbytes :].view(dtype)[:count], code.numel)


def _message_bytes(code: IndexCode, dtype: torch.dtype) -> int:
    return code.nbytes + code.count * dtype.itemsize


def _compact_bytes(code: IndexCode, codec: BlockCodec) -> int:
    """Return the size of a compact message."""
    return code.nbytes + codec.encoded_bytes(code.count)


def _quantize_values(
    message: Tensor, code: IndexCode, codec: BlockCodec, dtype: torch.dtype
) -> Tensor:
    """Return the compact form of ``message``, whose values are of ``dtype``."""
    compact = message.new_empty(_compact_bytes(code, codec))
    compact[: code.nbytes] = message[: code.nbytes]
    codec.encode(message[code.nbytes :].view(dtype), compact[code.nbytes :].view(1, -1), code.count)
    return compact


def _expand(messages: Tensor, code: IndexCode, codec: BlockCodec, dtype: torch.dtype) -> Tensor:
    """Return ``messages``, which are compact, (ranks, bytes), with values of ``dtype``.

    If a value is not finite, all values of its message become NaN.
    """
    expanded = messages.new_empty((len(messages), code.nbytes + code.count * dtype.itemsize))
    expanded[:, : code.nbytes] = messages[:, : code.nbytes]
    for compact, message in zip(messages, expanded, strict=True):
        codec.assemble(
            compact[code.nbytes :].view(1, -1), message[code.nbytes :].view(dtype), code.count
        )
    return expanded


class _OneByOne:
    """On the CPU: reads and adds each vector by itself."""

    def __init__(self, own: SparseVector, vectors: Sequence[SparseVector]) -> None:
        self.own = own
        self._vectors = vectors
        self.all_finite = torch.ones((), dtype=torch.bool, device=own.values.device)
        for vector in vectors:
            self.all_finite &= vector.values.isfinite().all()

    def commit(self, total: Tensor, error: Tensor | None, buffer: Tensor) -> Tensor:
        if is_known_false(self.all_finite):
            return buffer.fill_(torch.nan)
        if error is not None:
            self.own.subtract_from(total)
            error.copy_(total)
        mean = to_memory_dtype(buffer.zero_())
        for vector in self._vectors:
            share = vector.values.to(mean.dtype) / len(self._vectors)
            scatter_add(share, vector.indices, mean)
        return buffer.copy_(mean)


class _AllAtOnce:
    """On a GPU: reads and adds all vectors in four kernels, for any number of ranks."""

    def __init__(self, own: SparseVector, messages: Tensor, code: IndexCode, rank: int) -> None:
        self.own = own
        self._rank = rank
        self._received = kernels.receive(messages, own.values.dtype, code)
        self.all_finite = self._received.all_finite

    def commit(self, total: Tensor, error: Tensor | None, buffer: Tensor) -> Tensor:
        kernels.store_mean(self._received, buffer, own_rank=self._rank, total=total, error=error)
        return buffer
