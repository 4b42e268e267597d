"""The best assignments of one bucket: the least seconds for each error, as costs.py adds them."""

from dataclasses import dataclass

import numpy as np

from commhooks.planning.tables import GRID, BucketTable, Floats, GroupTable, Ints

__all__ = ["Front", "bucket_front"]

_MOST_HOOKS = 3
"""In one bucket, besides those that a group has no alternative to."""


@dataclass(frozen=True)
class Front:
    """Assignments of a bucket, with rising units of error and falling seconds."""

    units: Ints
    seconds: Floats
    picks: Ints
    """One row per assignment, one column per group: positions in ``Group.choices``."""


def bucket_front(table: BucketTable, local_weight: float) -> Front:
    """Return the front of one bucket. ``local_weight``: the share of local work that nothing hides.

    Groups are added one by one. Of the assignments of the first groups, those are kept that may
    become part of the front.
    """
    states = _States.of_nothing()
    fixed = table.latencies + local_weight * table.overheads
    forced = 0
    for group in table.groups:
        forced |= (1 << int(group.hooks[0])) if len(group.hooks) == 1 else 0
    for group in table.groups:
        states = states.with_group(group, fixed, local_weight).pruned(forced)
    best = states.take(_fronts(states, np.zeros_like(states.mask)))
    return Front(best.units, best.total, best.picks)


@dataclass(frozen=True)
class _States:
    """Assignments of the first groups of a bucket."""

    mask: Ints
    """The hooks in use, as bits."""
    units: Ints
    growing: Floats
    """The seconds that grow with the groups."""
    total: Floats
    lost: Floats
    picks: Ints

    @classmethod
    def of_nothing(cls) -> "_States":
        zero, none = np.zeros(1, np.int64), np.zeros(1)
        return cls(zero, zero, none, none, none, np.zeros((1, 0), np.int64))

    def take(self, which: Ints) -> "_States":
        return _States(
            self.mask[which],
            self.units[which],
            self.growing[which],
            self.total[which],
            self.lost[which],
            self.picks[which],
        )

    def with_group(self, group: GroupTable, fixed: Floats, local_weight: float) -> "_States":
        """Return each assignment with each choice of one more group, within the limit."""
        units = self.units[:, None] + group.units
        old, new = np.nonzero(units <= GRID)
        bits = np.left_shift(1, group.hooks)[new]
        seconds = (group.sending + local_weight * group.local)[new]
        first_use = np.where(self.mask[old] & bits, 0.0, fixed[group.hooks[new]])
        return _States(
            self.mask[old] | bits,
            units[old, new],
            self.growing[old] + seconds,
            self.total[old] + first_use + seconds,
            self.lost[old] + group.lost[new],
            np.concatenate([self.picks[old], group.picks[new, None]], axis=1),
        )

    def pruned(self, forced: int) -> "_States":
        """Drop assignments that cannot become part of the front."""
        kept = self.take(np.flatnonzero(_bits(self.mask & ~np.int64(forced)) <= _MOST_HOOKS))
        # Whoever is slower without its fixed seconds than another one with them stays behind.
        kept = kept.take(np.argsort(kept.units, kind="stable"))
        best = np.minimum.accumulate(kept.total)
        last = np.searchsorted(kept.units, kept.units, side="right") - 1
        kept = kept.take(np.flatnonzero(kept.growing <= best[last]))
        return kept.take(_fronts(kept, kept.mask))


def _fronts(states: _States, families: Ints) -> Ints:
    """Return the positions, in each family, of those faster than all with a smaller error."""
    order = np.lexsort((states.lost, states.total, states.units, families))
    _, family = np.unique(families[order], return_inverse=True)
    _, rank = np.unique(states.total[order], return_inverse=True)
    key = rank - family.astype(np.int64) * (len(rank) + 1)  # a new family is below all before
    before = np.concatenate([[len(rank) + 1], np.minimum.accumulate(key)[:-1]])
    positions: Ints = order[key < before]
    return positions


def _bits(mask: Ints) -> Ints:
    """Count the bits that are set."""
    count = np.zeros_like(mask)
    while mask.any():
        count += mask & 1
        mask = mask >> 1
    return count
