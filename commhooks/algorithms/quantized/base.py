"""The base class of hooks that quantize: they choose a format, and whether errors are fed back.

It is a two-shot all-reduce, whose bytes per rank do not grow with the number of ranks. A step of
rank r of N, where ``encode`` and ``decode`` are those of the format::

    values = gradient + error
    messages = [encode(part) for part in values.split(n / N)]
    error = values - cat([decode(message) for message in messages])
    received = all_to_all(messages)                     # part r of all N ranks
    average = mean([decode(message) for message in received]) + average_error
    message = encode(average)
    average_error = average - decode(message)
    return cat([decode(message) for message in all_gather(message)])

A rank sends (N-1) messages of n/N numbers twice, as many numbers as in a ring all-reduce. Gathering
the gradients of all ranks instead would take (N-1) messages of n numbers. Without error feedback
both errors are zero.

A block with a number that is not finite has a scale that is not finite. It passes from the rank's
message into the average, and from there to all ranks: Note [All finite] in codecs/finite.py. Until
they have looked at it, the gradients' memory holds the residuals.

Note [Two errors]
~~~~~~~~~~~~~~~~~
With error feedback, the errors of a rank's own numbers and of the averages of its part are added to
the numbers that are encoded at the same position in the next step (Tang et al. 2019, DoubleSqueeze,
algorithm 1). Then, summed over any number of steps, and with means over the ranks:

    results + mean of own errors + errors of averages = mean gradients

``state[parameter]["error"]`` is this rank's own error, in the parameter's shape. If this rank
averages elements of the parameter, ``"average_error"`` is the flat error of these averages, and
``"average_start"`` the position of the first of them in the parameter's memory. Which elements a
rank averages depends on the buckets and on the number of ranks. When it changes, errors of averages
are multiplied by the number of ranks and added to this rank's own errors, so that they contribute
to the mean in full.

Note [Errors that do not grow]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Error feedback adds the part of a gradient g that was not sent to the next gradient. If a hook
leaves out at most a share q < 1 of its input, in some norm, then the errors stay bounded:

    |e| <= q·|g + previous e|    and so    |e| <= q / (1 - q) · |g|

Otherwise they may grow in each step, even if the hook is unbiased. Codecs that round to nearest
leave out much less. Codecs with stochastic rounding may leave out more than the input: if a block
holds one number of size 1 and many of size 1/100, each of the small ones becomes 0 or, rarely, 1.
Numbers are quantized twice, first each rank's own and then their average. If each time a share c is
left out, then

    q = c + c·(1 + c) = (1 + c)² - 1    which is below 1 for c < √2 - 1

For unbiased rounding, the same holds for the shares of expected squares of norms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commhooks.algorithms.bucket_memory import (
    ErrorDtype,
    KeepsErrors,
    PerBucketCache,
    part_length,
    part_of,
)
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.codecs.finite import copy_if
from commhooks.codecs.formats import Format
from commhooks.codecs.rounding import bits_of, round_stochastically
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import TensorState
from commhooks.hook.state import StateField
from commhooks.precision import at_least_float32
from reducer import GradBucket


@dataclass
class Quantized(KeepsErrors):
    """Average quantized gradients. A subclass chooses the format and whether errors are fed back.

    Averages are summed in float32. Errors are kept in float32, or in float64 for float64 gradients.
    If a number of a bucket is not finite on any rank, then the bucket averages to NaN on all ranks
    and no error changes. On a GPU nothing synchronizes, and CuPy is required.
    """

    block_size: BlockSize = 256
    """Numbers per scale. Smaller blocks: closer to the average, more bytes."""
    seed: int = field(default=0, kw_only=True)
    """The seed of random numbers, which also depend on the rank, the step and the bucket."""

    rounds = 2
    rotate = False  # without a type, or it would be an option of all hooks

    def __post_init__(self) -> None:
        super().__post_init__()
        self._codec = self.make_codec()
        self._average_codec = BlockCodec(
            self.average_format(), self.block_size, rotated=self.rotate
        )
        self._average_errors: PerBucketCache[tuple[slice, Tensor]] = PerBucketCache(self)

    def number_format(self) -> Format:
        """Return the format of each rank's own numbers, as the options specify."""
        raise NotImplementedError(f"{type(self).__qualname__} has no `number_format`")

    def average_format(self) -> Format:
        """Return the format of averages."""
        return self.number_format()

    def make_codec(self) -> BlockCodec:
        """Return the codec of each rank's own numbers."""
        return BlockCodec(self.number_format(), self.block_size, rotated=self.rotate)

    @property
    def capturable_from(self) -> int | None:
        formats = self.number_format(), self.average_format()
        is_random = any(each.is_stochastic for each in formats)
        return None if is_random or (self.error_feedback and self.error_dtype) else 0

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        if not self.error_feedback:
            return ()

        def misfit(entry: Mapping[str, Tensor]) -> str | None:
            return _misfit(entry, gradient.numel())

        return (
            *super().state_fields(gradient),
            StateField("average_error", "own", (None,), torch.float32, is_optional=True),
            StateField("average_start", "own", (), torch.int64, is_optional=True, check=misfit),
        )

    def keep_own(self, mean: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Add the errors of averages: an element counts N times in one of the N own errors."""
        if "average_error" in own:
            error, average = mean["error"], own["average_error"]
            flat = error.as_strided((error.numel(),), (1,))  # as the parameter lies in memory
            start = int(own["average_start"])
            flat[start : start + average.numel()] += average

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        numel = bucket.buffer().numel()
        codecs, length = (self._codec, self._average_codec), part_length(numel, size)
        return (size - 1) * sum(codec.encoded_bytes(length) for codec in codecs) if numel else 0

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        with self._error(bucket, comm) as error:
            return await self._average(bucket, comm, error)

    async def _average(
        self, bucket: GradBucket, comm: Communicator, own_error: Tensor | None
    ) -> Tensor:
        buffer = bucket.buffer()
        values = buffer.to(at_least_float32(buffer.dtype))
        tells_contribution = comm.wants_contribution and self.tells_contribution
        if tells_contribution:
            comm.contribution = values.clone()
        if values.numel() == 0:
            return buffer
        part = part_of(values.numel(), comm.size, comm.rank)  # the part that this rank averages
        average_error = None
        if own_error is not None:
            average_error = self._average_error(bucket, comm, part, own_error)
        keep_residual = self.error_feedback or tells_contribution
        # Without stochastic rounding only the signs of zeros are random: a graph may repeat them.
        step = comm.step if self.capturable_from is None else "any"
        seed = f"{self.seed}:{bucket.key}:{step}:{comm.rank}"
        length = part_length(values.numel(), comm.size)

        nbytes = self._codec.encoded_bytes(length)
        messages = values.new_empty((comm.size, nbytes), dtype=torch.uint8)
        number = bits_of(f"{seed}:own")
        self._codec.encode(
            values, messages, length, error=own_error, seed=number, keep_residual=keep_residual
        )
        received = await comm.all_to_all(messages)
        del messages  # buckets in flight need less memory if each frees its messages early

        average = values.new_empty(part.stop - part.start, dtype=torch.float32)
        self._codec.average(received, average, length)
        del received
        nbytes = self._average_codec.encoded_bytes(length)
        message = values.new_empty((1, nbytes), dtype=torch.uint8)
        number = bits_of(f"{seed}:average")
        self._average_codec.encode(
            average, message, length, error=average_error, seed=number, keep_residual=keep_residual
        )
        gathered = await comm.all_gather(message[0])

        # `values` and `average` now hold the residuals.
        if tells_contribution:
            assert comm.contribution is not None
            comm.contribution -= values
            comm.contribution[part] -= comm.size * average  # its error counts as this rank's own
        finite = self._average_codec.assemble(gathered, values, length, kept=own_error)
        if average_error is not None:
            copy_if(finite, average, average_error)
        return buffer if values is buffer else buffer.copy_(values)

    def _average_error(
        self, bucket: GradBucket, comm: Communicator, part: slice, own_error: Tensor
    ) -> Tensor:
        """Return the errors of the averages of ``part``, in which a step may store new ones.

        They are float32. Errors of other elements that the state holds are moved to ``own_error``.
        """
        kept_part, average = self._average_errors.get(bucket) or (None, None)
        if average is None or kept_part != part:
            average = _rebuild_average_error(bucket, comm.size, part, self.state, own_error)
            if self.error_dtype is not None:  # what has moved is nowhere else, if the step fails
                seed = bits_of(f"moved:{bucket.key}:{comm.step}:{comm.rank}")
                round_stochastically(own_error, 1.0, self._errors.of(bucket, self.state), seed)
            self._average_errors.put(bucket, (part, average))
        return average


@dataclass
class QuantizedWithFeedback(Quantized):
    """Base of quantizing hooks with optional error feedback."""

    error_feedback: bool = True
    """Add the error of a step to the next gradient. Without it, the result is biased."""
    error_dtype: ErrorDtype = field(default=None, kw_only=True)
    """None keeps errors in float32 (float64 for float64 gradients). bfloat16, rounded
    stochastically, halves their memory."""


def _rebuild_average_error(
    bucket: GradBucket, size: int, part: slice, state: TensorState, own: Tensor
) -> Tensor:
    """Return the errors of the averages of ``part``, with views of them in ``state``."""
    average = own.new_zeros(part.stop - part.start, dtype=torch.float32)
    for name, offset, length in zip(bucket.names, bucket.offsets, bucket.lengths, strict=True):
        # The elements of the parameter, from its first one, that lie in the part; perhaps none.
        start = min(max(part.start - offset, 0), length)
        stop = min(max(part.stop - offset, start), length)
        begin = offset + start - part.start
        error = average[begin : begin + stop - start]
        entry = state[name]
        if "average_error" in entry:
            first, kept = int(entry.pop("average_start")), entry.pop("average_error")
            if (first, first + kept.numel()) == (start, stop):
                error.copy_(kept)
            else:
                first += offset
                own[first : first + kept.numel()] += size * kept.to(own.device)
        if error.numel() > 0:
            entry["average_start"] = torch.tensor(start)
            entry["average_error"] = error
    return average


def _misfit(entry: Mapping[str, Tensor], numel: int) -> str | None:
    """Describe what is wrong with a saved error of averages, of a parameter of that size."""
    if ("average_start" in entry) != ("average_error" in entry):
        return "expected both 'average_start' and 'average_error', or none of them, found one"
    if "average_start" in entry:
        start, count = int(entry["average_start"]), entry["average_error"].numel()
        if not 0 <= start <= numel - count:
            return f"expected 0 to {numel - count}, found {start}"
    return None
