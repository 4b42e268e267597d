"""The quantization errors that a hook has yet to send, by parameter name."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.per_bucket_cache import PerBucketCache
from commhooks.algorithms.quantized.two_shot import Errors, part_of
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookStateError
from commhooks.hook.base import TensorState
from reducer import GradBucket

__all__ = ["ErrorMemory"]


class ErrorMemory:
    """Keep both errors of each bucket, see Note [Two errors] in two_shot.py.

    ``state[parameter]["error"]`` is this rank's own error, in the parameter's shape. If this rank
    averages elements of the parameter, ``"average_error"`` is the flat error of these averages, and
    ``"average_start"`` the position of the first of them in the parameter's memory.

    Which elements a rank averages depends on the buckets and on the number of ranks. When it
    changes, errors of averages are multiplied by the number of ranks and added to this rank's own
    errors, so that they contribute to the mean in full.
    """

    def __init__(self) -> None:
        self._own = BucketMemory("error")
        self._cache: PerBucketCache[tuple[slice, Errors]] = PerBucketCache()

    def of(self, bucket: GradBucket, comm: Communicator, state: TensorState) -> Errors:
        """Return the errors of a bucket, which are zeros at first."""
        own = self._own.of(bucket, state)
        part = part_of(own.numel(), comm.size, comm.rank)
        cached_part, errors = self._cache.get(bucket) or (None, None)
        if errors is None or errors.own is not own or cached_part != part:
            errors = Errors(own, _rebuild_average_errors(bucket, comm, part, state, own))
            self._cache.put(bucket, (part, errors))
        return errors


def _rebuild_average_errors(
    bucket: GradBucket, comm: Communicator, part: slice, state: TensorState, own: Tensor
) -> Tensor:
    """Return the errors of the averages of ``part``, with views of them in ``state``.

    Errors of other elements that ``state`` holds are moved to ``own``.
    """
    average = own.new_zeros(part.stop - part.start, dtype=torch.float32)
    for segment in _segments(bucket, part):
        entry = state[segment.name]
        begin = segment.offset + segment.start - part.start
        error = average[begin : begin + segment.stop - segment.start]
        if "average_error" in entry:
            start, kept = _pop_average_error(segment, entry)
            if (start, start + kept.numel()) == (segment.start, segment.stop):
                error.copy_(kept)
            else:
                start += segment.offset
                own[start : start + kept.numel()] += comm.size * kept.to(own.device)
        if error.numel() > 0:
            entry["average_start"] = torch.tensor(segment.start)
            entry["average_error"] = error
    return average


def _pop_average_error(segment: "_Segment", entry: dict[str, Tensor]) -> tuple[int, Tensor]:
    """Remove the errors of averages from a state; return their start in the parameter and them."""
    kept = entry.pop("average_error")
    start = int(entry.pop("average_start", torch.tensor(-1)))
    if kept.dim() != 1 or not 0 <= start <= segment.length - kept.numel():
        raise CommHookStateError(
            f"state of {segment.name!r}: expected a flat 'average_error' within elements 0 to "
            f"{segment.length} that begins at 'average_start'; found shape {tuple(kept.shape)} at "
            f"{start}: it is damaged, or was saved for another model"
        )
    return start, kept


@dataclass(frozen=True)
class _Segment:
    """Elements ``start`` to ``stop`` of one parameter, which is at ``offset`` in the bucket."""

    name: str
    offset: int
    length: int
    start: int
    stop: int


def _segments(bucket: GradBucket, part: slice) -> Iterator[_Segment]:
    """Yield the segment of each parameter that lies in ``part`` of the bucket, even if empty."""
    for name, offset, length in zip(bucket.names, bucket.offsets, bucket.lengths, strict=True):
        start = min(max(part.start - offset, 0), length)
        stop = min(max(part.stop - offset, start), length)
        yield _Segment(name, offset, length, start, stop)
