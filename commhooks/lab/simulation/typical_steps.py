"""Chooses a few steps whose weighted mean stands for the whole training."""

from collections import Counter
from collections.abc import Sequence

from commhooks.hook.base import CommHook
from commhooks.hook.derived_bucket import bucket_with
from reducer import GradBucket

__all__ = ["typical_steps"]

_WINDOW = 1000
_MOST_KINDS = 8


def typical_steps(
    hook: CommHook, buckets: Sequence[GradBucket], size: int, first: int
) -> dict[int, float]:
    """Return one step of each kind, from step ``first`` on, with the share of steps of its kind.

    Two steps are of one kind if the cost formula of the hook gives the same bytes for both:
    ``local_sgd`` with a period of 8 has two kinds. If there are many kinds, as in a warm-up, steps
    at equal distances stand for all of them. A hook without a formula gets two consecutive steps,
    because some hooks alternate.
    """
    kinds: dict[tuple[int | None, ...], int] = {}
    counts: Counter[int] = Counter()
    for step in range(first, first + _WINDOW):
        sent = tuple(hook.wire_bytes(bucket_with(b, b.buffer(), step=step), size) for b in buckets)
        if None in sent:
            return {first: 0.5, first + 1: 0.5}
        counts[kinds.setdefault(sent, step)] += 1
    if len(counts) > _MOST_KINDS:
        distance = _WINDOW // _MOST_KINDS
        return {first + i * distance: 1 / _MOST_KINDS for i in range(_MOST_KINDS)}
    return {step: count / _WINDOW for step, count in counts.items()}
