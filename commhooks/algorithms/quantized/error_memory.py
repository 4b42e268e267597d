"""The quantization errors that a hook has yet to send, by parameter name.

Numbers are quantized twice: each rank's own numbers, and the average of the part that it owns. With
error feedback, both errors are added to the numbers that are encoded at the same position in the
next step (Tang et al. 2019, DoubleSqueeze, algorithm 1). Then, summed over any number of steps, and
with means over the ranks:

    results + mean of own errors + errors of averages = mean gradients
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory, PerBucketCache
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import TensorState
from commhooks.hook.state import StateField
from reducer import GradBucket


def part_length(numel: int, size: int) -> int:
    """Return the length of the first part of ``size``; the last parts may be shorter, or empty.

    It is ⌈numel / size⌉, rounded up to a multiple of 32 so that no two parts share a cache line.
    """
    return min(-(-numel // (32 * size)) * 32, numel)


def part_of(numel: int, size: int, rank: int) -> slice:
    """Return the elements that ``rank`` averages."""
    length = part_length(numel, size)
    return slice(min(rank * length, numel), min((rank + 1) * length, numel))


class ErrorMemory:
    """Keep both errors of each bucket.

    ``state[parameter]["error"]`` is this rank's own error, in the parameter's shape. If this rank
    averages elements of the parameter, ``"average_error"`` is the flat error of these averages, and
    ``"average_start"`` the position of the first of them in the parameter's memory.

    Which elements a rank averages depends on the buckets and on the number of ranks. When it
    changes, errors of averages are multiplied by the number of ranks and added to this rank's own
    errors, so that they contribute to the mean in full.
    """

    def __init__(self) -> None:
        self._own = BucketMemory("error")
        self._cache: PerBucketCache[tuple[slice, Tensor]] = PerBucketCache()

    def fields(self, gradient: Tensor) -> Sequence[StateField]:
        """Return the declaration of the errors for :meth:`CommHook.state_fields`."""

        def misfit(entry: Mapping[str, Tensor]) -> str | None:
            return _misfit(entry, gradient.numel())

        return (
            self._own.field(gradient),
            StateField("average_error", "own", (None,), torch.float32, is_optional=True),
            StateField("average_start", "own", (), torch.int64, is_optional=True, check=misfit),
        )

    def keep_average(self, mean: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Add a rank's error of averages to the mean of all ranks' own errors.

        An element counts N times in one of the N own errors.
        """
        if "average_error" in own:
            error, average = mean["error"], own["average_error"]
            flat = error.as_strided((error.numel(),), (1,))  # as the parameter lies in memory
            start = int(own["average_start"])
            flat[start : start + average.numel()] += average

    def of(
        self, bucket: GradBucket, comm: Communicator, state: TensorState
    ) -> tuple[Tensor, Tensor]:
        """Return the errors of a bucket, zeros at first, in which a step may store new ones.

        This rank's own: (numel,), in float32, or float64 for float64 gradients. That of averages:
        float32, one number per element of the part that this rank averages.
        """
        own = self._own.of(bucket, state)
        part = part_of(own.numel(), comm.size, comm.rank)
        cached_part, average = self._cache.get(bucket, state) or (None, None)
        if average is None or cached_part != part:
            average = _rebuild_average_errors(bucket, comm, part, state, own)
            self._cache.put(bucket, (part, average))
        return own, average


def _rebuild_average_errors(
    bucket: GradBucket, comm: Communicator, part: slice, state: TensorState, own: Tensor
) -> Tensor:
    """Return the errors of the averages of ``part``, with views of them in ``state``.

    Errors of other elements that ``state`` holds are moved to ``own``.
    """
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
                own[first : first + kept.numel()] += comm.size * kept.to(own.device)
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
