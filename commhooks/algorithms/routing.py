"""Splits buckets among hooks by a table of parameters."""

import operator
from collections.abc import Mapping

from commhooks.hook.derived_bucket import BucketPart, Progress
from reducer import GradBucket

__all__ = ["Routing"]


class Routing:
    """Which of several hooks each parameter has, and which bucket each hook gets next.

    The table may change between two steps.
    """

    def __init__(self, table: Mapping[str, int]) -> None:
        self.table = dict(table)
        """The position of each parameter's hook, by name."""
        self._progress: dict[int, Progress] = {}

    def begin_step(self) -> None:
        """Number the buckets of each hook from 0 again."""
        self._progress = {}
        for name, i in self.table.items():
            self._progress.setdefault(i, Progress(set())).missing.add(name)

    def parts(self, bucket: GradBucket) -> list[tuple[int, BucketPart]]:
        """Return the positions of the bucket's hooks, each with its parameters, in order."""
        members: dict[int, list[int]] = {}
        for position, name in enumerate(bucket.names):
            members.setdefault(self.table[name], []).append(position)
        ordered = sorted(members.items(), key=operator.itemgetter(0))
        return [(i, BucketPart(bucket, positions)) for i, positions in ordered]

    def next_bucket(self, i: int, part: BucketPart) -> GradBucket:
        """Return the next bucket of hook ``i``.

        Call it when the hook begins, not before: while other hooks wait, hook ``i`` may get a part
        of a later bucket.
        """
        index, is_last = self._progress[i].advance(part.names, part.whole.left_out)
        # On torch DDP, other buckets of the hook may have been left out.
        return part.bucket(index, is_last=is_last or part.whole.is_last())
