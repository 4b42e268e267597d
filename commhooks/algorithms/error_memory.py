"""What a quantising hook has yet to send, by parameter name."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.communicator import Communicator
from commhooks.hook import TensorState
from commhooks.transport import Feedback, part_of
from reducer import GradBucket

__all__ = ["ErrorMemory"]


class ErrorMemory:
    """Both errors of :mod:`commhooks.transport`, for each bucket.

    In ``state[parameter]``: ``error``, this rank's own, in the parameter's shape; and, where this
    rank averages elements of the parameter, ``average_error`` of those elements, flat, of which
    ``average_start`` is the first one's place in the parameter's memory.

    Which elements a rank averages changes with the buckets and with the number of ranks. Then their
    error goes, times that number, into this rank's own error, from where it reaches the mean whole.
    """

    def __init__(self) -> None:
        self._own = BucketMemory("error")
        self._cuts: dict[str, _Cut] = {}

    def of(self, bucket: GradBucket, comm: Communicator, state: TensorState) -> Feedback:
        """The errors of a bucket, zeros at first."""
        own = self._own.of(bucket, state)
        cut = self._cuts.get(bucket.key)
        if cut is None or cut.feedback.own is not own:
            cut = _Cut(frozenset(bucket.names), _take_over(bucket, comm, state, own))
            for key, other in list(self._cuts.items()):
                if not cut.names.isdisjoint(other.names):
                    del self._cuts[key]
            self._cuts[bucket.key] = cut
        return cut.feedback


@dataclass(frozen=True)
class _Cut:
    """One bucket, as it is cut at present."""

    names: frozenset[str]
    feedback: Feedback


@dataclass(frozen=True)
class _Piece:
    """Elements of one parameter, counted in its own memory, and where this begins in the bucket."""

    name: str
    offset: int
    start: int
    stop: int


def _take_over(bucket: GradBucket, comm: Communicator, state: TensorState, own: Tensor) -> Feedback:
    part = part_of(own.numel(), comm.size, comm.rank)
    average = own.new_zeros(part.stop - part.start, dtype=torch.float32)
    for piece in _pieces(bucket, part):
        entry = state[piece.name]
        start, kept = entry.pop("average_start", None), entry.pop("average_error", None)
        begin = piece.offset + piece.start - part.start
        error = average[begin : begin + piece.stop - piece.start]
        if start is not None and kept is not None:
            first = int(start)
            if (first, first + kept.numel()) == (piece.start, piece.stop):
                error.copy_(kept)
            else:
                first += piece.offset
                own[first : first + kept.numel()] += comm.size * kept
        if error.numel() > 0:
            entry["average_start"] = torch.tensor(piece.start)
            entry["average_error"] = error
    return Feedback(own, average)


def _pieces(bucket: GradBucket, part: slice) -> Iterator[_Piece]:
    """What of each parameter lies in ``part`` of the bucket, empty pieces included."""
    for name, offset, length in zip(bucket.names, bucket.offsets, bucket.lengths, strict=True):
        start = min(max(part.start - offset, 0), length)
        stop = min(max(part.stop - offset, start), length)
        yield _Piece(name, offset, start, stop)
