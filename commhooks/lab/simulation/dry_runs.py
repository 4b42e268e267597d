"""What is known of a hook on a model from a few world sizes, told for any."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from commhooks.costs.growth import bytes_at, seconds_at
from commhooks.costs.step_trace import BucketScript, Collective, StepScript
from commhooks.errors import CommHookError

__all__ = ["Rehearsals", "rehearsed_sizes"]

_LARGEST = 32
"""Ranks of the largest world that is rehearsed; what an all-gather brings has to fit in memory."""


def rehearsed_sizes(world_sizes: Sequence[int], ranks_per_node: int) -> list[int]:
    """Those of ``world_sizes`` that are small enough, and three to extrapolate from."""
    largest = max(8, _LARGEST // ranks_per_node) * ranks_per_node
    exact = {size for size in world_sizes if size <= largest}
    return sorted(exact | {2 * ranks_per_node, 4 * ranks_per_node, largest})


@dataclass(frozen=True)
class Rehearsals:
    """By world size: the kinds of steps there are, with their shares of all steps."""

    by_size: Mapping[int, Sequence[tuple[float, StepScript]]]
    ranks_per_node: int
    _told: dict[int, list[tuple[float, StepScript]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def at(self, size: int) -> list[tuple[float, StepScript]]:
        """Of ``size`` ranks, a multiple of ``ranks_per_node``.

        Raises CommHookError if the hook does other things in larger worlds than in smaller ones.
        """
        if size in self.by_size:
            return list(self.by_size[size])
        if size not in self._told:  # which is asked for again for every rate of the links
            self._told[size] = self._extrapolate(size)
        return self._told[size]

    def _extrapolate(self, size: int) -> list[tuple[float, StepScript]]:
        sizes = [known for known in self.by_size if known >= 2 * self.ranks_per_node]
        kinds = zip(*(self.by_size[known] for known in sizes), strict=True)
        return [
            (kind[0][0], _extrapolate(size, sizes, [script for _, script in kind]))
            for kind in kinds
        ]

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "ranks_per_node": self.ranks_per_node,
            "by_size": {
                str(size): [[share, script.to_json()] for share, script in kinds]
                for size, kinds in self.by_size.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Rehearsals":
        """What :meth:`to_json` gave."""
        by_size = {
            int(size): [(share, StepScript.from_json(script)) for share, script in kinds]
            for size, kinds in data["by_size"].items()
        }
        return cls(by_size, data["ranks_per_node"])


def _extrapolate(size: int, sizes: Sequence[int], scripts: Sequence[StepScript]) -> StepScript:
    buckets = zip(*(script.buckets for script in scripts), strict=True)
    return replace(scripts[0], buckets=tuple(_bucket(size, sizes, known) for known in buckets))


def _bucket(size: int, sizes: Sequence[int], known: Sequence[BucketScript]) -> BucketScript:
    if len({script.structure for script in known}) > 1:
        found = {n: script.structure for n, script in zip(sizes, known, strict=True)}
        raise CommHookError(
            f"cannot tell what the hook does among {size} ranks: its collectives differ from world "
            f"size to world size, {found}; simulate sizes of at most {_LARGEST} ranks"
        )
    local = zip(*(script.local_seconds for script in known), strict=True)
    collectives = zip(*(script.collectives for script in known), strict=True)
    return replace(
        known[0],
        local_seconds=tuple(seconds_at(size, sizes, seconds) for seconds in local),
        collectives=tuple(_collective(size, sizes, c) for c in collectives),
    )


def _collective(size: int, sizes: Sequence[int], known: Sequence[Collective]) -> Collective:
    return replace(known[0], tensor_bytes=bytes_at(size, sizes, [c.tensor_bytes for c in known]))
