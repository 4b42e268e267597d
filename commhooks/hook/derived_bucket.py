"""Buckets made of other buckets, for hooks around hooks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reducer import GradBucket

__all__ = ["Part", "bucket_with", "bucket_without"]


def bucket_with(bucket: GradBucket, buffer: Tensor) -> GradBucket:
    """The same bucket with other numbers in it, perhaps of another dtype."""
    return GradBucket(
        buffer,
        bucket.parameters(),
        bucket.names,
        index=bucket.index(),
        count=_count(bucket.index(), is_last=bucket.is_last()),
        step=bucket.step,
        left_out=bucket.left_out,
    )


def bucket_without(bucket: GradBucket, withheld: Sequence[str], index: int) -> GradBucket:
    """The same bucket for a hook that does not get others, with these parameters, of the step."""
    return GradBucket(
        bucket.buffer(),
        bucket.parameters(),
        bucket.names,
        index=index,
        count=_count(index, is_last=bucket.is_last()),
        step=bucket.step,
        left_out=[*bucket.left_out, *withheld],
    )


@dataclass(frozen=True)
class Part:
    """Some of the parameters of a bucket, by their positions in it."""

    whole: GradBucket
    members: Sequence[int]

    @property
    def names(self) -> list[str]:
        """Of these parameters."""
        names = self.whole.names
        return [names[member] for member in self.members]

    def bucket(self, index: int, *, is_last: bool) -> GradBucket:
        """A bucket of these parameters; of a true part the gradients are copied."""
        parameters = self.whole.parameters()
        flat = self.whole.buffer()
        return GradBucket(
            flat if self._is_whole else torch.cat(self._views(flat)),
            [parameters[member] for member in self.members],
            self.names,
            index=index,
            count=_count(index, is_last=is_last),
            step=self.whole.step,
            left_out=self.whole.left_out,
        )

    def store(self, values: Tensor, flat: Tensor) -> None:
        """Writes the numbers of these parameters into ``flat``, laid out like the whole."""
        if values is flat:
            return
        values = values.view(-1)
        if self._is_whole:
            flat.copy_(values)
            return
        start = 0
        for view in self._views(flat):
            view.copy_(values[start : start + view.numel()])
            start += view.numel()

    @property
    def _is_whole(self) -> bool:
        return len(self.members) == len(self.whole.names)

    def _views(self, flat: Tensor) -> list[Tensor]:
        offsets, lengths = self.whole.offsets, self.whole.lengths
        return [flat[offsets[i] : offsets[i] + lengths[i]] for i in self.members]


def _count(index: int, *, is_last: bool) -> int:
    """A bucket does not tell how many there are, only whether it is the last."""
    return index + 1 if is_last else index + 2
