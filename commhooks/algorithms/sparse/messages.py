"""Messages of sparse hooks: the elements that a rank sends, their all-gather, and the commit.

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

Note [Many elements]
~~~~~~~~~~~~~~~~~~~~
An all-gather sends (N-1) messages of each rank, an all-reduce 2·(N-1)/N times the whole vector,
zeros included. With many elements, as in a warm-up, or many ranks, the all-reduce sends less, and
needs memory for one vector instead of N messages. All ranks decide by the largest count, so that no
step sends more than plain averaging in float32 (without a codec, whose values are few bits).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from commhooks.algorithms.sparse.selection import scatter_add
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.finite import all_finite, copy_if, is_known_false, select
from commhooks.codecs.index_code import IndexCode, words_of
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_gather_bytes, all_reduce_bytes
from commhooks.kernels import kernel_backend_of, launch
from commhooks.kernels.launcher import blocks_for
from commhooks.kernels.source import ELEMENTS, SPARSE, TYPES, kernel_name
from commhooks.precision import at_least_float32, saturating_cast
from reducer import GradBucket

_SEGMENT = 4096  # as in kernels/sparse.cu


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


@dataclass(frozen=True)
class GatheredVectors:
    """The sparse vectors of all ranks, or their sum."""

    own: SparseVector
    """This rank's vector, as all ranks have received it."""
    all_finite: Tensor
    """() bool: whether all values, and so all elements of all ranks' buckets, are finite.

    A damaged message makes it false on a GPU; on the CPU it raises RuntimeError.
    """
    commit: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    """``commit(total, error, buffer)`` finishes the step as Note [Sparse commit] says.

    If all values are finite, ``error`` becomes ``total`` minus this rank's vector, and ``buffer``
    the mean over ranks, the same on all of them. Otherwise ``error`` stays as it is and ``buffer``
    becomes NaN. ``total`` may be ``buffer``; its contents are lost. ``buffer`` has the dtype of the
    values that arrived, and is returned. Does not wait for the device.
    """


async def gather(
    own: SparseVector,
    counts: Sequence[int],
    comm: Communicator,
    codec: BlockCodec | None = None,
) -> GatheredVectors:
    """All-gather the sparse vectors of all ranks, padded to the longest, or sum them.

    ``counts`` holds the number of values on each rank. If all are zero, nothing is sent. With a
    codec, which rounds the values, those that arrive are float32, or float64 if they were.
    See Note [Many elements].
    """
    code = IndexCode.shortest(own.numel, max(counts))
    if code.count == 0:
        return _one_by_one(own, [])
    if _sum_bytes(code, own.values.dtype, codec, comm.size) is not None:
        return await _sum(own, comm)
    if codec is not None:
        own = replace(own, values=to_memory_dtype(own.values))
    dtype = own.values.dtype
    message = write_message(own, code)
    del own  # what is received holds it as well
    if codec is None:
        messages = await comm.all_gather(message)
    else:
        compact = await comm.all_gather(_quantize_values(message, code, codec, dtype))
        messages = _expand(compact, code, codec, dtype)
    del message
    if kernel_backend_of(messages) is None:
        pairs = zip(messages, counts, strict=True)
        vectors = [_read_message(message, code, dtype, n) for message, n in pairs]
        return _one_by_one(vectors[comm.rank], vectors)
    read = MessagesOnDevice(messages, dtype, code)
    count = counts[comm.rank]
    values = messages[comm.rank, code.nbytes :].view(dtype)[:count]
    own = SparseVector(read.indices[comm.rank, :count], values, code.numel)
    return GatheredVectors(own, read.all_finite, partial(read.store_mean, comm.rank))


async def _sum(own: SparseVector, comm: Communicator) -> GatheredVectors:
    """All-reduce the vectors with their zeros."""
    dtype = at_least_float32(own.values.dtype)
    mean = await comm.all_reduce(own.dense(dtype).div_(comm.size))
    return _with_commit(own, all_finite(mean), lambda _: mean)


def _with_commit(
    own: SparseVector, finite: Tensor, mean_in: Callable[[Tensor], Tensor]
) -> GatheredVectors:
    """Return vectors whose commit goes through torch. ``mean_in(buffer)`` may use its memory."""

    def commit(total: Tensor, error: Tensor | None, buffer: Tensor) -> Tensor:
        if is_known_false(finite):
            return buffer.fill_(torch.nan)
        if error is not None:
            scatter_add(-own.values.to(total.dtype), own.indices, total)
            copy_if(finite, total, error)
        return buffer.copy_(select(finite, mean_in(buffer), torch.nan))

    return GatheredVectors(own, finite, commit)


def gather_bytes(bucket: GradBucket, count: int, size: int, codec: BlockCodec | None = None) -> int:
    """Return the bytes that each of ``size`` ranks sends to :func:`gather` ``count`` elements."""
    dtype = bucket.buffer().dtype
    code = IndexCode.shortest(bucket.buffer().numel(), count)
    summed = _sum_bytes(code, dtype, codec, size)
    return all_gather_bytes(_message_bytes(code, dtype, codec), size) if summed is None else summed


def _sum_bytes(
    code: IndexCode, dtype: torch.dtype, codec: BlockCodec | None, size: int
) -> int | None:
    """Return the bytes of an all-reduce of the vectors, None if an all-gather sends less."""
    nbytes = all_reduce_bytes(code.numel * at_least_float32(dtype).itemsize, size)
    is_less = nbytes < all_gather_bytes(_message_bytes(code, dtype), size)
    return nbytes if codec is None and is_less else None


def write_message(vector: SparseVector, code: IndexCode) -> Tensor:
    """Return the message, uint8, padded with zeros to ``code.count`` values."""
    dtype = vector.values.dtype
    message = vector.indices.new_zeros(_message_bytes(code, dtype), dtype=torch.uint8)
    if kernel_backend_of(message) is None:
        code.pack(vector.indices, out=message[: code.nbytes])
        message[code.nbytes :].view(dtype)[: vector.count] = vector.values
        return message
    count, high_words = vector.count, words_of(code.high_bits)
    low_words = words_of(count * code.low_bits)
    layout = (count, code.low_bits, code.adds_ordinal, high_words, low_words, code.nbytes)
    arguments = (vector.indices, vector.values, *layout, message)
    kernel = kernel_name("pack", ELEMENTS[dtype])
    launch(SPARSE, kernel, arguments, grid=blocks_for(max(count, low_words)))
    return message


def _read_message(message: Tensor, code: IndexCode, dtype: torch.dtype, count: int) -> SparseVector:
    """Return the ``count`` values of a message on the CPU, as a view of it."""
    indices = code.unpack(message[: code.nbytes], count)
    return SparseVector(indices, message[code.nbytes :].view(dtype)[:count], code.numel)


def _message_bytes(code: IndexCode, dtype: torch.dtype, codec: BlockCodec | None = None) -> int:
    """Return the size of a message, or of its compact form by a codec."""
    values = code.count * dtype.itemsize if codec is None else codec.encoded_bytes(code.count)
    return code.nbytes + values


def _quantize_values(
    message: Tensor, code: IndexCode, codec: BlockCodec, dtype: torch.dtype
) -> Tensor:
    """Return the compact form of ``message``, whose values are of ``dtype``."""
    compact = message.new_empty(_message_bytes(code, dtype, codec))
    compact[: code.nbytes] = message[: code.nbytes]
    codec.encode(message[code.nbytes :].view(dtype), compact[code.nbytes :].view(1, -1), code.count)
    return compact


def _expand(messages: Tensor, code: IndexCode, codec: BlockCodec, dtype: torch.dtype) -> Tensor:
    """Return ``messages``, which are compact, (ranks, bytes), with values of ``dtype``.

    If a value is not finite, all values of its message become NaN.
    """
    expanded = messages.new_empty((len(messages), _message_bytes(code, dtype)))
    expanded[:, : code.nbytes] = messages[:, : code.nbytes]
    for compact, message in zip(messages, expanded, strict=True):
        codec.assemble(
            compact[code.nbytes :].view(1, -1), message[code.nbytes :].view(dtype), code.count
        )
    return expanded


def _one_by_one(own: SparseVector, vectors: Sequence[SparseVector]) -> GatheredVectors:
    """On the CPU: check and add each vector by itself."""
    finite = torch.ones((), dtype=torch.bool, device=own.values.device)
    for vector in vectors:
        finite &= all_finite(vector.values)

    def mean_in(buffer: Tensor) -> Tensor:
        mean = to_memory_dtype(buffer.zero_())
        for vector in vectors:
            # In place: the message is not needed any more.
            values = vector.values.to(mean.dtype).div_(len(vectors))
            scatter_add(values, vector.indices, mean)
        return mean

    return _with_commit(own, finite, mean_in)


class MessagesOnDevice:
    """The messages of all ranks on a GPU, read in three kernels for any number of ranks.

    ``messages``: (ranks, bytes) uint8; each holds up to ``code.count`` values of ``dtype``, at
    least 1, and zeros behind them. Nothing here waits for the device.
    """

    def __init__(self, messages: Tensor, dtype: torch.dtype, code: IndexCode) -> None:
        ranks, pitch = messages.shape
        capacity, high_words = code.count, words_of(code.high_bits)
        tiles, segments = blocks_for(high_words), blocks_for(code.numel, _SEGMENT)
        words = messages.new_zeros(ranks * tiles + ranks + 1, dtype=torch.int64)
        self.indices = messages.new_empty((ranks, capacity), dtype=torch.int32)
        """(ranks, capacity); only the first indices of each row, as many as the rank sent, are set.
        """
        self.all_finite = messages.new_empty((), dtype=torch.bool)
        """() bool: whether all values are finite and all messages intact, with ascending indices.
        """
        # The position of the first index of each rank in each segment of the result.
        self._starts = messages.new_empty((ranks, segments + 1), dtype=torch.int32)
        self._values = messages, pitch, code.nbytes
        grid = (tiles, ranks, 1)
        count = (messages, pitch, high_words, capacity, words, self.all_finite)
        launch(SPARSE, kernel_name("count_indices"), count, grid=grid)
        form = (code.low_bits, code.adds_ordinal, high_words)
        unpack = (messages, pitch, *form, words, capacity, self.indices)
        launch(SPARSE, kernel_name("unpack"), unpack, grid=grid)
        check = (*self._values, self.indices, capacity, words, tiles, code.numel, segments)
        launch(
            SPARSE,
            kernel_name("check", ELEMENTS[dtype]),
            (*check, self._starts, self.all_finite),
            grid=(blocks_for(capacity), ranks, 1),
        )

    def store_mean(
        self, own_rank: int, total: Tensor, error: Tensor | None, mean: Tensor
    ) -> Tensor:
        """Commit: see :attr:`GatheredVectors.commit`. ``total`` may share the mean's memory."""
        ranks, capacity = self.indices.shape
        received = (*self._values, self.indices, capacity, self._starts, ranks)
        result = (mean.numel(), self.all_finite, own_rank, total, error, mean)
        kernel = kernel_name(
            "store_mean", TYPES[at_least_float32(mean.dtype)], ELEMENTS[mean.dtype]
        )
        launch(SPARSE, kernel, (*received, *result), grid=blocks_for(mean.numel(), _SEGMENT))
        return mean
