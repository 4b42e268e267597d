"""Quantized two-shot all-reduce: bytes per rank do not grow with the number of ranks.

::

    messages = [encode(part) for part in (values + error).split(n / N)]
    received = all_to_all(messages)                     # rank j: part j of all N ranks
    average = mean([decode(message) for message in received])
    gathered = all_gather(encode(average + average_error))
    values = cat([decode(message) for message in gathered])

A rank sends (N-1) messages of n/N numbers twice, as many numbers as in a ring all-reduce. Gathering
the gradients of all ranks instead would take (N-1) messages of n numbers.

Note [Two errors]
~~~~~~~~~~~~~~~~~
Numbers are quantized twice: each rank's own numbers, and the average of the part that it owns. With
error feedback, both errors are added to the numbers that are encoded at the same position in the
next step (Tang et al. 2019, DoubleSqueeze, algorithm 1). Then, summed over any number of steps, and
with means over the ranks:

    results + mean of own errors + errors of averages = mean gradients

Note [Errors are committed last]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A block with a number that is not finite has a scale that is not finite. It passes from the rank's
message into the average, and from there to all ranks. All ranks look at the same gathered messages,
so they agree on whether to change the errors. Until then the gradients' memory holds the residuals,
and the errors keep their values. The answer stays on the device: the operations that write depend
on it, and the host does not wait. See Note [All finite] in codecs/finite.py.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.codecs.block import BlockCodec
from commhooks.codecs.finite import copy_if
from commhooks.comm.communicator import Communicator

__all__ = ["Errors", "average_quantized", "part_length", "part_of", "wire_bytes"]


@dataclass(frozen=True)
class Errors:
    """The quantization errors of one bucket, to be sent in the next step. See Note [Two errors].

    ``own``: (numel,), in the dtype of the values. ``average``: float32, one number per element of
    the part that this rank averages.
    """

    own: Tensor
    average: Tensor


def wire_bytes(numel: int, size: int, codec: BlockCodec, average_codec: BlockCodec) -> int:
    """Return the bytes that each of ``size`` ranks sends to average ``numel`` values."""
    length = part_length(numel, size)
    message_bytes = codec.encoded_bytes(length) + average_codec.encoded_bytes(length)
    return (size - 1) * message_bytes if numel else 0


def part_length(numel: int, size: int) -> int:
    """Return the length of the first part of ``size``; the last parts may be shorter, or empty.

    It is ⌈numel / size⌉, rounded up to a multiple of 32 so that no two parts share a cache line.
    """
    return min(-(-numel // (32 * size)) * 32, numel)


def part_of(numel: int, size: int, rank: int) -> slice:
    """Return the elements that ``rank`` averages."""
    length = part_length(numel, size)
    return slice(min(rank * length, numel), min((rank + 1) * length, numel))


async def average_quantized(
    values: Tensor,
    comm: Communicator,
    codec: BlockCodec,
    average_codec: BlockCodec,
    *,
    seed: str,
    errors: Errors | None = None,
    tells_contribution: bool = False,
) -> None:
    """Replace ``values`` by their average over the ranks, quantized, identical on all ranks.

    Values are flat, float32 or float64. ``codec`` encodes them, and ``average_codec`` encodes the
    averages, which are summed in float32. ``errors`` of the previous steps are replaced by those of
    this step. If a value of any rank is not finite, all values become NaN on all ranks, and
    ``errors`` do not change. Random numbers depend on ``seed``, the rank, the step and the message.

    With ``tells_contribution``, set ``comm.contribution`` to this rank's share of the average,
    where the error of the part that it averages counts as its own. Do not combine it with
    ``errors`` or with codecs that vote.

    Wire: (N-1) messages of each codec, of numel / N values (see :func:`part_length`), or nothing if
    there are no values. On a GPU everything is queued on torch's current stream without
    synchronizing.
    """
    if tells_contribution:
        comm.contribution = values.clone()
    if values.numel() == 0:
        return
    keep_residual = errors is not None or tells_contribution
    length = part_length(values.numel(), comm.size)
    own_part = part_of(values.numel(), comm.size, comm.rank)

    messages = values.new_empty((comm.size, codec.encoded_bytes(length)), dtype=torch.uint8)
    codec.encode(
        values,
        messages,
        length,
        error=None if errors is None else errors.own,
        seed=_seed(seed, comm, "own"),
        keep_residual=keep_residual,
    )
    received = await comm.all_to_all(messages)

    average = values.new_empty(own_part.stop - own_part.start, dtype=torch.float32)
    codec.average(received, average, length)
    message = received.new_empty((1, average_codec.encoded_bytes(length)))
    average_codec.encode(
        average,
        message,
        length,
        error=None if errors is None else errors.average,
        seed=_seed(seed, comm, "average"),
        keep_residual=keep_residual,
    )
    gathered = await comm.all_gather(message[0])

    # `values` and `average` now hold the residuals.
    if tells_contribution:
        assert comm.contribution is not None
        comm.contribution -= values
        comm.contribution[own_part] -= comm.size * average
    if errors is None:
        average_codec.assemble(gathered, values, length)
    else:
        all_finite = average_codec.assemble(gathered, values, length, kept=errors.own)
        copy_if(all_finite, average, errors.average)


def _seed(seed: str, comm: Communicator, message: str) -> int:
    """Return 64 bits that depend on the seed, the step, the rank and the message."""
    text = f"{seed}:{comm.step}:{comm.rank}:{message}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
