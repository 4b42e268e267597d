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
    codec's random numbers depend on ``seed``, the rank, the step and the message.

    Without ``feedback``, ``comm.contribution`` is set if wanted: what of these values is in the
    average, where the error of the average of this rank's part counts as this rank's.

    Wire: 2·(N-1) messages of ⌈numel / N⌉ values; nothing if there are no values.
    """
    exchange = _Exchange(values, comm, codec, seed, feedback)
    if values.numel() > 0:
        received = await comm.all_to_all(exchange.encode_parts())
        gathered = await comm.all_gather(exchange.encode_average(received))
        exchange.finish(gathered)
    return values


class _Exchange:
    """What happens to the values of one bucket before, between and after the two collectives."""

    def __init__(
        self,
        values: Tensor,
        comm: Communicator,
        codec: Codec,
        seed: str,
        feedback: Feedback | None,
    ) -> None:
        self._values = values
        self._comm = comm
        self._codec = codec
        self._seed = seed
        self._feedback = feedback
        self._parts = [part_of(values.numel(), comm.size, rank) for rank in range(comm.size)]
        own = self._parts[comm.rank]
        self._average = values.new_empty(own.stop - own.start, dtype=torch.float32)
        if comm.wants_contribution and feedback is None:
            comm.contribution = values.clone()
        self._keep_residual = feedback is not None or comm.contribution is not None

    def encode_parts(self) -> Tensor:
        """(N, bytes): a message for each rank. Values become what these leave out, if kept."""
        longest = self._parts[0].stop
        shape = (len(self._parts), self._codec.encoded_bytes(longest))
        messages = self._values.new_empty(shape, dtype=torch.uint8)
        for peer, part in enumerate(self._parts):
            error = None if self._feedback is None else self._feedback.own[part]
            self._encode(self._values[part], messages[peer], error, peer)
        return messages

    def encode_average(self, received: Tensor) -> Tensor:
        """(bytes,): of this rank's part. The average becomes what this leaves out, if kept."""
        self._codec.decode(received, self._average)
        message = torch.empty_like(received[0])
        error = None if self._feedback is None else self._feedback.average
        self._encode(self._average, message, error, "average")
        return message

    def finish(self, gathered: Tensor) -> None:
        """Takes over the averages of all parts, (N, bytes). See Note [One verdict]."""
        if self._comm.contribution is not None:
            self._comm.contribution -= self._values
            self._comm.contribution[self._parts[self._comm.rank]] -= self._comm.size * self._average
        rows = [gathered[peer : peer + 1] for peer in range(len(self._parts))]
        lengths = [part.stop - part.start for part in self._parts]
        if not all(map(self._codec.is_finite, rows, lengths)):
            self._values.fill_(torch.nan)
            return
        for row, part in zip(rows, self._parts, strict=True):
            kept = None if self._feedback is None else self._feedback.own[part]
            self._codec.decode(row, self._values[part], kept=kept)
        if self._feedback is not None:
            self._feedback.average.copy_(self._average)

    def _encode(self, values: Tensor, message: Tensor, error: Tensor | None, what: object) -> None:
        text = f"{self._seed}:{self._comm.step}:{self._comm.rank}:{what}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        self._codec.encode(
            values, message, error=error, seed=seed, keep_residual=self._keep_residual
        )
