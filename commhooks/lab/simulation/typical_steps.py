"""Which steps to look at, so that their mean is that of the training."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from commhooks.hook.base import CommHook
from reducer import GradBucket

__all__ = ["at_step", "typical_steps"]

_WINDOW = 1000
_MOST_KINDS = 8


def typical_steps(
    hook: CommHook, buckets: Sequence[GradBucket], size: int, first: int
) -> dict[int, float]:
    """One step of each kind among the steps from ``first`` on, and the kind's share of all.

    Steps are of one kind if the hook's cost formula gives the same for them: ``local_sgd`` with a
    period of 8 has two kinds. Where there are many, as in a warm-up, steps at equal distances stand
    for all. A hook without a formula is seen in two steps, as some take turns.
    """
    costs: dict[tuple[int | None, ...], int] = {}
    counts: Counter[int] = Counter()
    for step in range(first, first + _WINDOW):
        cost = _cost(hook, buckets, size, step)
        if None in cost:
            return {first: 0.5, first + 1: 0.5}
        counts[costs.setdefault(cost, step)] += 1
    if len(counts) > _MOST_KINDS:
        distance = _WINDOW // _MOST_KINDS
        return {first + i * distance: 1 / _MOST_KINDS for i in range(_MOST_KINDS)}
    return {step: count / _WINDOW for step, count in counts.items()}


def _cost(
    hook: CommHook, buckets: Sequence[GradBucket], size: int, step: int
) -> tuple[int | None, ...]:
    return tuple(
        hook.wire_bytes(at_step(bucket, bucket.buffer(), len(buckets), step), size)
        for bucket in buckets
    )


def at_step(bucket: GradBucket, buffer: Tensor, count: int, step: int) -> GradBucket:
    """The bucket, one of ``count``, as it is in another step, with ``buffer`` as its numbers."""
    return GradBucket(
        buffer,
        bucket.parameters(),
        bucket.names,
        index=bucket.index(),
        count=count,
        step=step,
    )
