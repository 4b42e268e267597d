"""Averages what is sent in few bits, such that no rank sends more when there are more ranks.

::

    rank i:  parts 0 .. N-1 of its numbers, encoded    --- all-to-all --->
    rank j:  N messages, all of part j: decoded, averaged in float32, encoded again
    rank j:  the average of part j, encoded            --- all-gather --->
    rank i:  N messages, one of each part: decoded

A rank sends (N-1) messages of n/N numbers, twice, as in an all-reduce. Gathering the messages of
all ranks instead would cost (N-1) messages of n numbers.

Note [Two errors]
~~~~~~~~~~~~~~~~~
Numbers are rounded twice: a rank's own, and the average of the part that it owns. With feedback
both errors are added to what is encoded at the same place in the next step (Tang et al. 2019,
DoubleSqueeze, algorithm 1). Then, over any number of steps, with means over the ranks:

    sum of results + mean of own errors + errors of averages = sum of mean gradients

Note [One verdict]
~~~~~~~~~~~~~~~~~~
A block that is not finite makes a scale that is not, which passes from a rank's message into the
average and from there to all ranks. These all look at the same gathered messages, so they agree
whether to change what is kept. Until then the gradients' memory holds the residuals, and the errors
are as they were.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.codecs import Codec
from commhooks.communicator import Communicator

__all__ = ["Feedback", "average_encoded", "part_of", "wire_bytes"]


@dataclass(frozen=True)
class Feedback:
    """What was not sent of one bucket so far, to be sent now. See Note [Two errors].

    ``own``: (numel,), of the dtype of the values. ``average``: float32, one number per element of
    this rank's part.
    """

    own: Tensor
    average: Tensor


def wire_bytes(numel: int, size: int, codec: Codec) -> int:
    """What each of ``size`` ranks sends to average ``numel`` values."""
    return 2 * (size - 1) * codec.encoded_bytes(part_length(numel, size)) if numel else 0


def part_length(numel: int, size: int) -> int:
    """The most elements that one of ``size`` parts has: ⌈numel / size⌉. Last parts have fewer."""
    return -(-numel // size)


def part_of(numel: int, size: int, rank: int) -> slice:
    """The elements that ``rank`` averages."""
    length = part_length(numel, size)
    return slice(min(rank * length, numel), min((rank + 1) * length, numel))


async def average_encoded(
    values: Tensor,
    comm: Communicator,
    codec: Codec,
    *,
    seed: str = "",
    feedback: Feedback | None = None,
) -> Tensor:
    """Replaces ``values`` by their average over the ranks, as ``codec`` renders it, on all alike.

    Values are flat, float32 or float64. If those of any rank are not finite, the result is NaN on
    all ranks and ``feedback`` stays as it was; else it takes over the errors of this step. The
    codec's random numbers depend on ``seed``, the rank, the step and the kind of message.

    If asked for, ``comm.contribution`` is what of these values is in the average, the error of this
    rank's part included; that has a meaning only without ``feedback``.

    Wire: 2·(N-1) messages of ⌈numel / N⌉ values; nothing if there are no values.
    """
    numel = values.numel()
    if numel == 0:
        comm.contribution = values if comm.wants_contribution else None
        return values
    given = values.clone() if comm.wants_contribution else None
    keep_residual = feedback is not None or given is not None
    parts = [part_of(numel, comm.size, rank) for rank in range(comm.size)]
    own_part = parts[comm.rank]

    message_bytes = codec.encoded_bytes(part_length(numel, comm.size))
    messages = values.new_empty((comm.size, message_bytes), dtype=torch.uint8)
    for peer, part in enumerate(parts):
        codec.encode(
            values[part],
            messages[peer],
            error=None if feedback is None else feedback.own[part],
            seed=_hash(seed, comm, peer),
            keep_residual=keep_residual,
        )
    received = await comm.all_to_all(messages)

    average = values.new_empty(own_part.stop - own_part.start, dtype=torch.float32)
    codec.decode(received, average)
    message = messages[comm.rank]  # which has been sent
    codec.encode(
        average,
        message,
        error=None if feedback is None else feedback.average,
        seed=_hash(seed, comm, "average"),
        keep_residual=keep_residual,
    )
    gathered = await comm.all_gather(message)

    if given is not None:
        comm.contribution = given.sub_(values)
        comm.contribution[own_part] -= comm.size * average
    rows = [gathered[peer : peer + 1] for peer in range(comm.size)]
    lengths = [part.stop - part.start for part in parts]
    if not all(map(codec.is_finite, rows, lengths)):
        return values.fill_(torch.nan)
    for row, part in zip(rows, parts, strict=True):
        codec.decode(row, values[part], kept=None if feedback is None else feedback.own[part])
    if feedback is not None:
        feedback.average.copy_(average)
    return values


def _hash(seed: str, comm: Communicator, message: object) -> int:
    text = f"{seed}:{comm.step}:{comm.rank}:{message}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
