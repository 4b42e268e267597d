"""Top-k at indices that all ranks share, so that values go through an all-reduce.

The ranks take turns in choosing the indices: CLT-k, the cyclic local top-k of Chen et al.:
ScaleCom, NeurIPS 2020, https://arxiv.org/abs/2104.11125. A step t of N ranks, with gradients
``g[i]``, errors ``e[i]`` and the filter ``beta``::

    m = [g[i] + e[i] for i in range(N)]
    indices = []
    for p, part in enumerate(parts):    # slices of the bucket, one for each rank
        chosen = m[(p - t) % N][part].abs().topk(k // N).indices
        indices += (chosen + part.start).tolist()
    sent = [torch.zeros_like(m[i]) for i in range(N)]
    for i in range(N):
        sent[i][indices] = m[i][indices]
        e[i] = (1 - beta) * e[i] + beta * (m[i] - sent[i])
    result = sum(sent) / N

In the paper one rank chooses for the whole gradient, and broadcasts. Here a bucket has a part for
each rank, and the parts go round: for each part, the ranks choose one after the other. All ranks
select at once, each from 1/N of the elements, and all send the same number of bytes. Who chooses
follows from the number of the step, so nothing has to be agreed on or saved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from commhooks.algorithms.sparse.base import WarmedUp
from commhooks.algorithms.sparse.messages import (
    MessagesOnDevice,
    SparseVector,
    to_memory_dtype,
    write_message,
)
from commhooks.algorithms.sparse.selection import add_and_check, scatter_add, select_largest
from commhooks.codecs.finite import copy_if, is_known_false, poison, select
from commhooks.codecs.index_code import IndexCode, words_of
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_gather_bytes, all_reduce_bytes
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from commhooks.kernels import kernel_backend_of
from commhooks.precision import saturating_cast
from reducer import GradBucket

_NO_VALUES = torch.float16
"""Kernels write and read indices with values; these are zeros, and are not sent."""


@register_hook("shared_topk")
@dataclass
class SharedTopK(WarmedUp):
    """Average the elements chosen by each rank in turn; add the others to the next gradient.

    The ranks take turns in choosing the largest elements of a part of the bucket, and all ranks
    send the chosen ones. The bytes per rank stay below twice those of one message of ``topk`` at
    any number of ranks. At least one element of each part is sent.
    """

    beta: Annotated[float, Limits(gt=0, le=1)] = 1.0
    """The share of what was not sent in the new error, ScaleCom's low-pass filter. 1 keeps all;
    less is for large batches and learning rates."""

    capturable_from = None  # ranks take turns
    wire = "an all-gather of k/N indices, then an all-reduce of k values"
    paper = "https://arxiv.org/abs/2104.11125"
    rounds = 2

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        with self._error(bucket, comm) as error:
            total = to_memory_dtype(buffer)
            is_damaged = add_and_check(total, error)
            count = partial(self.sent_elements, bucket)
            indices, intact = await _choose_in_turn(total, count, bucket.step, comm)
            # The sum of all ranks has to fit too; the factor 2 leaves room for rounding up.
            share = total.index_select(0, indices) / comm.size
            share = saturating_cast(share, buffer.dtype, headroom=2 * comm.size)
            poison(share, is_damaged | ~intact)
            if comm.wants_contribution and self.tells_contribution:
                sent = share.to(total.dtype) * comm.size
                comm.contribution = SparseVector(indices, sent, total.numel()).dense(total.dtype)
            return await average_at(
                indices, share, total=total, error=error, beta=self.beta, buffer=buffer, comm=comm
            )

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        numel, itemsize = bucket.buffer().numel(), bucket.buffer().itemsize
        code = _code(numel, size, partial(self.sent_elements, bucket))
        if code is None:
            return all_reduce_bytes(numel * itemsize, size)
        values = all_reduce_bytes(code.count * size * itemsize, size)
        return all_gather_bytes(_sent_bytes(code), size) + values


async def _choose_in_turn(
    total: Tensor, count_of: Callable[[int], int], step: int, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Return the shared indices, ascending, and () bool: whether they arrived intact.

    ``count_of(length)`` is how many elements of a part are chosen. ``step`` counts those of the
    hook: inside ``diloco`` a multiple of the period would give the same rank the same part for
    ever. On the CPU a damaged message raises RuntimeError.
    """
    numel, size = total.numel(), comm.size
    code = _code(numel, size, count_of)
    intact = torch.ones((), dtype=torch.bool, device=total.device)
    if code is None:
        return torch.arange(numel, dtype=torch.int32, device=total.device), intact
    own = (comm.rank + step) % size
    part = total[_start(own, numel, size) : _start(own + 1, numel, size)]
    chosen = select_largest(part, None, code.count)
    zeros = chosen.new_zeros(code.count, dtype=_NO_VALUES)
    message = write_message(SparseVector(chosen, zeros, code.numel), code)
    by_rank = await comm.all_gather(torch.cat([message[used] for used in _used_bytes(code)]))
    messages = _with_values(by_rank.roll(step % size, 0), code)
    if kernel_backend_of(total) is None:
        indices = torch.stack([code.unpack(part[: code.nbytes]) for part in messages])
    else:
        read = MessagesOnDevice(messages, _NO_VALUES, code)
        indices, intact = read.indices.clamp(0, code.numel - 1), read.all_finite
    starts = torch.tensor([[_start(part, numel, size)] for part in range(size)], dtype=torch.int32)
    return (indices + starts.to(total.device, non_blocking=True)).view(-1), intact


async def average_at(
    indices: Tensor,
    share: Tensor,
    *,
    total: Tensor,
    error: Tensor | None,
    beta: float = 1.0,
    buffer: Tensor,
    comm: Communicator,
) -> Tensor:
    """Write the sum of all ranks' ``share`` to ``buffer`` at ``indices``, and zeros elsewhere.

    ``share`` is 1/N of what this rank sends of ``total``, whose contents are lost, and ``error``
    becomes what it does not send, filtered by ``beta``. If an element of ``share`` is not finite on
    any rank, ``buffer`` becomes NaN on all ranks and ``error`` does not change.
    """
    mean = await comm.all_reduce(share.clone())
    all_finite = mean.isfinite().all()
    if is_known_false(all_finite):
        return buffer.fill_(torch.nan)
    if error is not None:
        scatter_add(share.to(error.dtype) * -comm.size, indices, total)
        copy_if(all_finite, total if beta == 1 else torch.lerp(error, total, beta), error)
    buffer.fill_(select(all_finite, buffer.new_zeros(()), torch.nan))
    return buffer.index_copy_(0, indices.long(), select(all_finite, mean, torch.nan))


def _code(numel: int, size: int, count_of: Callable[[int], int]) -> IndexCode | None:
    """Return the code of the indices of a part; None if all elements are sent.

    All parts send equally many. The last part is never shorter than another one.
    """
    longest = numel - _start(size - 1, numel, size)
    count = count_of(longest)
    return IndexCode.shortest(longest, count, _sent_bytes) if count < longest else None


def _start(part: int, numel: int, size: int) -> int:
    """Return the first element of a part; the lengths of parts differ by at most 1."""
    return part * numel // size


def _used_bytes(code: IndexCode) -> tuple[slice, slice]:
    """Return where the bits are: a code has whole words, which would add up over many ranks."""
    low_at = 8 * words_of(code.high_bits)
    high_bytes, low_bytes = (-(-bits // 8) for bits in (code.high_bits, code.count * code.low_bits))
    return slice(0, high_bytes), slice(low_at, low_at + low_bytes)


def _sent_bytes(code: IndexCode) -> int:
    return sum(used.stop - used.start for used in _used_bytes(code))


def _with_values(sent: Tensor, code: IndexCode) -> Tensor:
    """Return whole messages for the bytes that were sent of each, (ranks, bytes)."""
    high, low = _used_bytes(code)
    messages = sent.new_zeros((len(sent), code.nbytes + code.count * _NO_VALUES.itemsize))
    messages[:, high] = sent[:, high]
    messages[:, low] = sent[:, high.stop :]
    return messages
