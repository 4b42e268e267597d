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
are as they were. The verdict stays on the device: whoever writes depends on it, and no host waits.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.codecs import Codec
from commhooks.codecs.finite import copy_if
from commhooks.comm.communicator import Communicator

__all__ = ["Feedback", "average_encoded", "part_length", "part_of", "wire_bytes"]


@dataclass(frozen=True)
class Feedback:
    """What was not sent of one bucket so far, to be sent now. See Note [Two errors].

    ``own``: (numel,), of the dtype of the values. ``average``: float32, one number per element of
    this rank's part.
    """

    own: Tensor
    average: Tensor


def wire_bytes(numel: int, size: int, codec: Codec, average_codec: Codec) -> int:
    """What each of ``size`` ranks sends to average ``numel`` values."""
    length = part_length(numel, size)
    message_bytes = codec.encoded_bytes(length) + average_codec.encoded_bytes(length)
    return (size - 1) * message_bytes if numel else 0


def part_length(numel: int, size: int) -> int:
    """The most elements that one of ``size`` parts has; the last ones have fewer, or none.

    ⌈numel / size⌉, up to a multiple of 32 so that no two parts share a line of memory.
    """
    return min(-(-numel // (32 * size)) * 32, numel)


def part_of(numel: int, size: int, rank: int) -> slice:
    """The elements that ``rank`` averages."""
    length = part_length(numel, size)
    return slice(min(rank * length, numel), min((rank + 1) * length, numel))


async def average_encoded(
    values: Tensor,
    comm: Communicator,
    codec: Codec,
    average_codec: Codec,
    *,
    seed: str = "",
    feedback: Feedback | None = None,
    tells_contribution: bool = False,
) -> Tensor:
    """Replaces ``values`` by their average over the ranks, as ``codec`` renders it, on all alike.

    Values are flat, float32 or float64. If those of any rank are not finite, the result is NaN on
    all ranks and ``feedback`` stays as it was; else it takes over the errors of this step. The
    codec's random numbers depend on ``seed``, the rank, the step and the message. Averages are
    encoded by ``average_codec``.

    With ``tells_contribution``, ``comm.contribution`` is set: what of these values is in the
    average, where the error of the average of this rank's part counts as this rank's. It has no
    meaning with ``feedback``, nor for codecs that vote.

    Wire: (N-1) messages of each codec, of numel / N values, see :func:`part_length`; nothing if
    there are no values. On a GPU everything is queued on torch's current stream, and nothing
    synchronizes.
    """
    if tells_contribution:
        comm.contribution = values.clone()
    exchange = _Exchange(values, comm, codec, average_codec, seed, feedback)
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
        average_codec: Codec,
        seed: str,
        feedback: Feedback | None,
    ) -> None:
        self._values = values
        self._comm = comm
        self._codec = codec
        self._average_codec = average_codec
        self._seed = seed
        self._feedback = feedback
        self._part_length = part_length(values.numel(), comm.size)
        self._own = part_of(values.numel(), comm.size, comm.rank)
        own_length = self._own.stop - self._own.start
        self._average = values.new_empty(own_length, dtype=torch.float32)
        self._keep_residual = feedback is not None or comm.contribution is not None

    def encode_parts(self) -> Tensor:
        """(N, bytes): a message for each rank. Values become what these leave out, if kept."""
        shape = (self._comm.size, self._codec.encoded_bytes(self._part_length))
        messages = self._values.new_empty(shape, dtype=torch.uint8)
        error = None if self._feedback is None else self._feedback.own
        self._encode(self._codec, self._values, messages, error, "own")
        return messages

    def encode_average(self, received: Tensor) -> Tensor:
        """(bytes,): of this rank's part. The average becomes what this leaves out, if kept."""
        self._codec.average(received, self._average, self._part_length)
        message_bytes = self._average_codec.encoded_bytes(self._part_length)
        messages = received.new_empty((1, message_bytes))
        error = None if self._feedback is None else self._feedback.average
        self._encode(self._average_codec, self._average, messages, error, "average")
        return messages[0]

    def finish(self, gathered: Tensor) -> None:
        """Takes over the averages of all parts, (N, bytes). See Note [One verdict]."""
        if self._comm.contribution is not None:
            self._comm.contribution -= self._values
            self._comm.contribution[self._own] -= self._comm.size * self._average
        if self._feedback is None:
            self._average_codec.assemble(gathered, self._values, self._part_length)
            return
        own, average = self._feedback.own, self._feedback.average
        is_finite = self._average_codec.assemble(
            gathered, self._values, self._part_length, kept=own
        )
        copy_if(is_finite, self._average, average)

    def _encode(
        self, codec: Codec, values: Tensor, messages: Tensor, error: Tensor | None, what: str
    ) -> None:
        text = f"{self._seed}:{self._comm.step}:{self._comm.rank}:{what}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        codec.encode(
            values,
            messages,
            self._part_length,
            error=error,
            seed=seed,
            keep_residual=self._keep_residual,
        )
