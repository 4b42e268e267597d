"""What a quantizing hook has yet to send, by parameter name."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.per_bucket_cache import PerBucketCache
from commhooks.algorithms.quantized.two_shot import Feedback, part_of
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookStateError
from commhooks.hook.base import TensorState
from reducer import GradBucket

__all__ = ["ErrorMemory"]


class ErrorMemory:
    """Both errors of :mod:`commhooks.algorithms.quantized.two_shot`, for each bucket.

    In ``state[parameter]``: ``error``, this rank's own, in the parameter's shape; and, where this
    rank averages elements of the parameter, ``average_error`` of those elements, flat, of which
    ``average_start`` is the first one's place in the parameter's memory.

    Which elements a rank averages changes with the buckets and with the number of ranks. Then their
    error goes, times that number, into this rank's own error, from where it reaches the mean whole.
    """

    def __init__(self) -> None:
        self._own = BucketMemory("error")
        self._cuts: PerBucketCache[tuple[slice, Feedback]] = PerBucketCache()

    def of(self, bucket: GradBucket, comm: Communicator, state: TensorState) -> Feedback:
        """The errors of a bucket, zeros at first."""
        own = self._own.of(bucket, state)
        part = part_of(own.numel(), comm.size, comm.rank)
        before, feedback = self._cuts.get(bucket) or (None, None)
        if feedback is None or feedback.own is not own or before != part:
            feedback = _take_over(bucket, comm, part, state, own)
            self._cuts.put(bucket, (part, feedback))
        return feedback


@dataclass(frozen=True)
class _Piece:
    """Elements ``start`` to ``stop`` of one parameter, which is at ``offset`` in the bucket."""

    name: str
    offset: int
    length: int
    start: int
    stop: int


def _take_over(
    bucket: GradBucket, comm: Communicator, part: slice, state: TensorState, own: Tensor
) -> Feedback:
    average = own.new_zeros(part.stop - part.start, dtype=torch.float32)
    for piece in _pieces(bucket, part):
        entry = state[piece.name]
        begin = piece.offset + piece.start - part.start
        error = average[begin : begin + piece.stop - piece.start]
        if "average_error" in entry:
            start, kept = _pop_average(piece, entry)
            if (start, start + kept.numel()) == (piece.start, piece.stop):
                error.copy_(kept)
            else:
                start += piece.offset
                own[start : start + kept.numel()] += comm.size * kept.to(own.device)
        if error.numel() > 0:
            entry["average_start"] = torch.tensor(piece.start)
            entry["average_error"] = error
    return Feedback(own, average)


def _pop_average(piece: _Piece, entry: dict[str, Tensor]) -> tuple[int, Tensor]:
    """What was kept of averages: where it starts in the parameter, and the errors."""
    kept = entry.pop("average_error")
    start = int(entry.pop("average_start", torch.tensor(-1)))
    if kept.dim() != 1 or not 0 <= start <= piece.length - kept.numel():
        raise CommHookStateError(
            f"state of {piece.name!r}: expected 'average_error' of elements 0 to {piece.length}, "
            f"flat, and in 'average_start' the first one's place; found shape {tuple(kept.shape)} "
            f"at {start}: it is damaged, or was saved for another model"
        )
    return start, kept


def _pieces(bucket: GradBucket, part: slice) -> Iterator[_Piece]:
    """What of each parameter lies in ``part`` of the bucket, empty pieces included."""
    for name, offset, length in zip(bucket.names, bucket.offsets, bucket.lengths, strict=True):
        start = min(max(part.start - offset, 0), length)
        stop = min(max(part.stop - offset, start), length)
        yield _Piece(name, offset, length, start, stop)
