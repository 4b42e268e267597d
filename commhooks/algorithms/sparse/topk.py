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

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from torch import Tensor

from commhooks.algorithms.sparse.base import WarmedUp
from commhooks.algorithms.sparse.messages import SparseVector, gather, gather_bytes, to_memory_dtype
from commhooks.algorithms.sparse.selection import select_largest, select_largest_of_chunks
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import integers
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookOptionError
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from reducer import GradBucket


@register_hook("topk")
@dataclass
class TopK(WarmedUp):
    """Average the largest elements of each rank's bucket; add the others to the next gradient.

    The largest elements are selected from the whole bucket, not per parameter. This leaves the
    smallest error for the bytes sent, and parameters with small gradients are sent once their error
    has grown. At least one element of each bucket is sent.
    """

    chunk: Annotated[int, Limits(ge=1, le=1 << 20)] | None = None
    """Select the same number of elements from each ``chunk`` consecutive ones, not from the whole
    bucket, so that every part of a model changes in each step. SparseLoCo has 4096 and a density of
    1/64."""
    bits: Literal[2, 4, 8] | None = None
    """Send values as integers of 2, 4 or 8 bits, with a scale per chunk. What they round off is
    kept in the error. Needs ``chunk``."""

    paper = "https://arxiv.org/abs/1809.07599"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is not None and self.chunk is None:
            raise CommHookOptionError(
                f"option 'bits' of hook {self.name!r}: expected 'chunk' beside it, because each "
                "chunk has a scale, found None; for example chunk=4096, density=1/64"
            )

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        with self._error(bucket, comm) as error:
            total = to_memory_dtype(buffer)
            codec, counts = self._codec(bucket), [self._count(bucket)] * comm.size
            # No name for what is sent: it can be freed as soon as it has been sent.
            gathered = await gather(self._selected(bucket, total, error), counts, comm, codec)
            if comm.wants_contribution and self.tells_contribution:
                comm.contribution = gathered.own.dense(total.dtype)
            mean = gathered.commit(total, error, buffer if codec is None else total)
            return mean if mean is buffer else buffer.copy_(mean)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        return gather_bytes(bucket, self._count(bucket), size, self._codec(bucket))

    def _selected(self, bucket: GradBucket, total: Tensor, error: Tensor | None) -> SparseVector:
        """Add the error to the total, and return its largest elements."""
        if self.chunk is None:
            indices = select_largest(total, error, self._count(bucket))
        else:
            per_chunk = self._per_chunk(bucket)
            indices = select_largest_of_chunks(total, error, self.chunk, per_chunk)
        return SparseVector.of(total, indices, bucket.buffer().dtype)

    def _count(self, bucket: GradBucket) -> int:
        """Return how many elements are sent of a bucket."""
        numel = bucket.buffer().numel()
        if self.chunk is None:
            return self.sent_elements(bucket, numel)
        whole, rest = divmod(numel, self.chunk)
        return whole * self._per_chunk(bucket) + min(rest, self._per_chunk(bucket))

    def _per_chunk(self, bucket: GradBucket) -> int:
        assert self.chunk is not None
        return self.sent_elements(bucket, self.chunk)

    def _codec(self, bucket: GradBucket) -> BlockCodec | None:
        return None if self.bits is None else _codec(self.bits, self._per_chunk(bucket))


@lru_cache
def _codec(bits: Literal[2, 4, 8], per_chunk: int) -> BlockCodec:
    """Return a codec with a block per chunk if codecs have such blocks, else with larger ones."""
    block_size = min(-(-per_chunk // 32) * 32, 4096)
    return BlockCodec(integers(bits, norm="signed_max" if bits == 2 else "max"), block_size)
