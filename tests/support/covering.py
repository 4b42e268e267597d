"""Covering arrays: samples of a parameter grid that hold every combination of few values.

The grid of a dtype, a size and a codec has as many cases as the product of the three. Most faults
depend on one value or on a pair of values, so a sample in which every pair occurs finds nearly all
of them with far fewer cases.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations

__all__ = ["covering_sample"]


def covering_sample(cases: Sequence[Sequence[Hashable]], strength: int) -> set[int]:
    """Return indices into ``cases`` that hold every combination of ``strength`` values.

    Each case has one value per axis. A combination counts if some case holds it, so the cases need
    not be a full product. The choice is greedy and deterministic: the case that adds the most new
    combinations, the first of several.
    """
    if not cases:
        return set()
    strength = min(strength, len(cases[0]))
    axes = list(combinations(range(len(cases[0])), strength))
    combinations_of = [
        {(chosen, tuple(case[axis] for axis in chosen)) for chosen in axes} for case in cases
    ]
    missing = set().union(*combinations_of)
    sample: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(combinations_of[index] & missing))
        sample.add(best)
        missing -= combinations_of[best]
    return sample
