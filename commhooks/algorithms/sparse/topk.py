"""Top-k: each rank sends the largest elements of a bucket and keeps the others for later steps.

A step with the gradient ``g[i]`` and the error ``e[i]`` of each rank i of N::

    for i in range(N):
        m = g[i] + e[i]
        indices = m.abs().topk(k).indices
        sent[i] = torch.zeros_like(m).index_copy(0, indices, m[indices])
        e[i] = m - sent[i]
    result = sum(sent) / N    # an all-gather of values and indices

Aji, Heafield: Sparse Communication for Distributed Gradient Descent, EMNLP 2017,
https://arxiv.org/abs/1704.05021; Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS
2018, https://arxiv.org/abs/1809.07599.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Literal

from torch import Tensor

from commhooks.algorithms.sparse.base import (
    SparseHook,
    SparseVector,
    gather,
    gather_bytes,
    to_memory_dtype,
)
from commhooks.algorithms.sparse.selection import (
    add_and_check,
    density_at,
    kept_elements,
    select_largest,
    select_largest_of_chunks,
)
from commhooks.algorithms.sparse.shared_indices import average_at, choose_in_turn, shared_bytes
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.finite import nan_unless
from commhooks.codecs.formats import integers
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookOptionError
from commhooks.hook.options import Ge, Gt, Le
from commhooks.hook.registry import register_hook
from commhooks.precision import saturating_cast
from reducer import GradBucket

__all__ = ["TopK"]


@register_hook("topk")
@dataclass
class TopK(SparseHook):
    """Average the largest elements of each rank's bucket; add the others to the next gradient.

    The largest elements are selected from the whole bucket, not per parameter. This leaves the
    smallest error for the bytes sent, and parameters with small gradients are sent once their error
    has grown. At least one element of each bucket is sent.

    Wire, per bucket and step: one all-gather of k values in the bucket's dtype and their indices of
    about 2 + log2(1/density) bits each; with shared indices, an all-gather of k/N of the indices
    and an all-reduce of the k values. Memory: the error, as large as the gradients, in float32
    (float64 for float64 gradients).

    If an element of a bucket is not finite on any rank, the bucket averages to NaN on all ranks and
    the error does not change. See Note [Sparse commit] in algorithms/sparse/base.py.
    """

    error_feedback: bool = field(default=True, kw_only=True)
    """Add what a step does not send to the next gradient. Otherwise small elements are lost."""
    density: Annotated[float, Gt(0), Le(1)] = 0.01
    """k as a share of the bucket's elements, after the warm-up."""
    warmup_steps: Annotated[int, Ge(0)] = 200
    """Number of steps in which the density decreases exponentially from ``warmup_density``. What is
    not sent in early steps is out of date when it is sent."""
    warmup_density: Annotated[float, Gt(0), Le(1)] = 1.0
    """Density of the first step, unless ``density`` is higher."""
    chunk: Annotated[int, Ge(1), Le(1 << 20)] | None = None
    """Select the same number of elements from each ``chunk`` consecutive ones, not from the whole
    bucket, so that every part of a model changes in each step. SparseLoCo has 4096 and a density of
    1/64."""
    bits: Literal[2, 4, 8] | None = None
    """Send values as integers of 2, 4 or 8 bits, with a scale per chunk. What they round off is
    kept in the error. Needs ``chunk``."""
    indices: Literal["own", "shared"] = "own"
    """ "own": each rank sends its own largest elements, in an all-gather. "shared": the ranks take
    turns in choosing the elements, which all ranks send, in an all-reduce; the bytes per rank stay
    below twice those of one message at any number of ranks. See Note [Indices in turn] in
    algorithms/sparse/shared_indices.py. Excludes ``chunk``."""
    beta: Annotated[float, Gt(0), Le(1)] = 1.0
    """With shared indices: how far a step moves the error towards what was not sent, the low-pass
    filter of ScaleCom. 1 keeps all; less is for large batches and learning rates."""

    wire = (
        "one all-gather of k values and their indices of about 2 + log2(1/density) bits; with "
        "indices='shared' an all-gather of k/N indices and an all-reduce of k values"
    )
    paper = "https://arxiv.org/abs/1809.07599"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.indices == "shared" and self.chunk is not None:
            raise CommHookOptionError(
                f"option 'chunk' of hook {self.name!r}: expected None, because each rank chooses "
                f"from a part of the bucket if indices are shared, found {self.chunk}"
            )
        if self.indices == "own" and self.beta != 1:
            raise CommHookOptionError(
                f"option 'beta' of hook {self.name!r}: expected 1 unless indices='shared', found "
                f"{self.beta}"
            )
        if self.bits is not None and self.chunk is None:
            raise CommHookOptionError(
                f"option 'bits' of hook {self.name!r}: expected 'chunk' beside it, because each "
                "chunk has a scale, found None; for example chunk=4096, density=1/64"
            )

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]  # depends on options
        """Whether the hook keeps no error: another error feedback would count it twice."""
        return not self.error_feedback

    def collectives(self, rank: int, size: int) -> dict[tuple[int, ...], int]:  # noqa: ARG002
        return {(): 2 if self.indices == "shared" else 1}

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        error = self._error(bucket)
        total = to_memory_dtype(buffer)
        if self.indices == "shared":
            return await self._reduce_shared(bucket, comm, total, error)
        own = SparseVector.of(total, self._select(bucket, total, error), buffer.dtype)
        codec = self._codec(bucket)
        gathered = await gather(own, [own.count] * comm.size, comm, codec)
        if comm.wants_contribution and self.tells_contribution:
            comm.contribution = gathered.own.dense(total.dtype)
        mean = gathered.commit(total, error, buffer if codec is None else total)
        return mean if mean is buffer else buffer.copy_(mean)

    async def _reduce_shared(
        self, bucket: GradBucket, comm: Communicator, total: Tensor, error: Tensor | None
    ) -> Tensor:
        buffer = bucket.buffer()
        flag = add_and_check(total, error)
        indices, intact = await choose_in_turn(
            total,
            lambda numel: kept_elements(self._density(bucket), numel),
            lambda part, count: select_largest(part, None, count),
            comm,
        )
        # The sum of all ranks has to fit too; the factor 2 leaves room for rounding up.
        share = total.index_select(0, indices) / comm.size
        share = saturating_cast(share, buffer.dtype, headroom=2 * comm.size)
        share[:1] += nan_unless(intact, flag).to(share.dtype)
        if comm.wants_contribution and self.tells_contribution:
            sent = share.to(total.dtype) * comm.size
            comm.contribution = SparseVector(indices, sent, total.numel()).dense(total.dtype)
        return await average_at(
            indices,
            share,
            total=total,
            error=error,
            beta=self.beta,
            buffer=buffer,
            comm=comm,
        )

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        if self.indices == "shared":
            buffer, density = bucket.buffer(), self._density(bucket)
            return shared_bytes(
                buffer.numel(), buffer.itemsize, size, lambda n: kept_elements(density, n)
            )
        return gather_bytes(bucket, self._count(bucket), size, self._codec(bucket))

    def _select(self, bucket: GradBucket, total: Tensor, error: Tensor | None) -> Tensor:
        """Add the error to the total, and return the indices of the largest elements."""
        if self.chunk is None:
            return select_largest(total, error, self._count(bucket))
        return select_largest_of_chunks(total, error, self.chunk, self._per_chunk(bucket))

    def _count(self, bucket: GradBucket) -> int:
        """Return how many elements are sent of a bucket."""
        numel = bucket.buffer().numel()
        if self.chunk is None:
            return kept_elements(self._density(bucket), numel)
        whole, rest = divmod(numel, self.chunk)
        return whole * self._per_chunk(bucket) + min(rest, self._per_chunk(bucket))

    def _per_chunk(self, bucket: GradBucket) -> int:
        assert self.chunk is not None
        return kept_elements(self._density(bucket), self.chunk)

    def _density(self, bucket: GradBucket) -> float:
        return density_at(
            bucket.step,
            density=self.density,
            warmup_steps=self.warmup_steps,
            warmup_density=self.warmup_density,
        )

    def _codec(self, bucket: GradBucket) -> BlockCodec | None:
        return None if self.bits is None else _codec(self.bits, self._per_chunk(bucket))


@lru_cache
def _codec(bits: Literal[2, 4, 8], per_chunk: int) -> BlockCodec:
    """Return a codec with a block per chunk if codecs have such blocks, else with larger ones."""
    block_size = min(-(-per_chunk // 32) * 32, 4096)
    return BlockCodec(integers(bits, norm="signed_max" if bits == 2 else "max"), block_size)
