"""Buckets derived from other buckets, for hooks around hooks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reducer import GradBucket


def bucket_with(
    bucket: GradBucket,
    buffer: Tensor,
    *,
    parameters: Sequence[Tensor] | None = None,
    index: int | None = None,
    step: int | None = None,
    withheld: Sequence[str] = (),
) -> GradBucket:
    """Return the same bucket with another buffer, which may have another dtype.

    ``parameters``, ``index`` and ``step`` replace those of the bucket, if they are given.
    ``withheld``: parameters whose buckets the hook does not get in this step.
    """
    return GradBucket(
        buffer,
        bucket.parameters() if parameters is None else list(parameters),
        bucket.names,
        index=bucket.index() if index is None else index,
        is_last=bucket.is_last(),
        step=bucket.step if step is None else step,
        left_out=[*bucket.left_out, *withheld],
    )


@dataclass(frozen=True)
class BucketPart:
    """Some of the parameters of a bucket, by their positions in it."""

    whole: GradBucket
    members: Sequence[int]

    @property
    def names(self) -> list[str]:
        """The names of these parameters."""
        names = self.whole.names
        return [names[member] for member in self.members]

    def bucket(self, index: int, *, is_last: bool) -> GradBucket:
        """Return a bucket of these parameters. Unless they are all, their gradients are copied."""
        parameters = self.whole.parameters()
        flat = self.whole.buffer()
        return GradBucket(
            flat if self.is_whole else torch.cat(self._views(flat)),
            [parameters[member] for member in self.members],
            self.names,
            index=index,
            is_last=is_last,
            step=self.whole.step,
            left_out=self.whole.left_out,
        )

    def store(self, values: Tensor, flat: Tensor) -> None:
        """Write the values of these parameters into ``flat``, which has the whole's layout."""
        if values is flat:
            return
        values = values.view(-1)
        if self.is_whole:
            flat.copy_(values)
            return
        start = 0
        for view in self._views(flat):
            view.copy_(values[start : start + view.numel()])
            start += view.numel()

    @property
    def is_whole(self) -> bool:
        """Whether these are all parameters of the bucket."""
        return len(self.members) == len(self.whole.names)

    def _views(self, flat: Tensor) -> list[Tensor]:
        offsets, lengths = self.whole.offsets, self.whole.lengths
        return [flat[offsets[i] : offsets[i] + lengths[i]] for i in self.members]


@dataclass
class Progress:
    """The progress of a hook that gets some of the parameters of a step."""

    missing: set[str]
    """Parameters whose bucket is still to come."""
    buckets: int = 0
    """The number of buckets so far."""

    def advance(self, names: Sequence[str], left_out: Sequence[str]) -> tuple[int, bool]:
        """Return the index of the bucket with the parameters ``names``, and whether it is last."""
        index = self.buckets
        self.buckets += 1
        self.missing.difference_update(names, left_out)
        return index, not self.missing
