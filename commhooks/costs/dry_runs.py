"""What dry runs of a hook show in worlds of a few sizes, extrapolated to worlds of any size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from commhooks.costs.growth import bytes_at, seconds_at
from commhooks.costs.step_trace import BucketTrace, Collective, ExchangeTrace, StepTrace
from commhooks.errors import CommHookError

__all__ = ["DryRuns", "dry_run_sizes"]

_Part = TypeVar("_Part", BucketTrace, ExchangeTrace)

_LARGEST = 32
"""Ranks of the largest dry run: what an all-gather receives has to fit in memory."""


def dry_run_sizes(world_sizes: Sequence[int], ranks_per_node: int) -> list[int]:
    """Return those of ``world_sizes`` that are small enough, and three to extrapolate from."""
    largest = max(8, _LARGEST // ranks_per_node) * ranks_per_node
    exact = {size for size in world_sizes if size <= largest}
    return sorted(exact | {2 * ranks_per_node, 4 * ranks_per_node, largest})


@dataclass(frozen=True)
class DryRuns:
    """Step traces of one hook by world size.

    Each size has one trace for every kind of step, with the share of steps that are of this kind.
    """

    by_size: Mapping[int, Sequence[tuple[float, StepTrace]]]
    ranks_per_node: int
    _extrapolated: dict[int, list[tuple[float, StepTrace]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def at(self, size: int) -> list[tuple[float, StepTrace]]:
        """Return the shares and traces for ``size`` ranks, a multiple of ``ranks_per_node``.

        Raises CommHookError if the collectives of the hook depend on the world size.
        """
        if size in self.by_size:
            return list(self.by_size[size])
        if size not in self._extrapolated:  # kept, because every rate of the links needs it
            self._extrapolated[size] = self._extrapolate(size)
        return self._extrapolated[size]

    def _extrapolate(self, size: int) -> list[tuple[float, StepTrace]]:
        sizes = [known for known in self.by_size if known >= 2 * self.ranks_per_node]
        kinds = zip(*(self.by_size[known] for known in sizes), strict=True)
        return [(kind[0][0], _step(size, sizes, [trace for _, trace in kind])) for kind in kinds]

    def to_json(self) -> dict[str, Any]:
        """Return the dry runs in JSON's types."""
        return {
            "ranks_per_node": self.ranks_per_node,
            "by_size": {
                str(size): [[share, trace.to_json()] for share, trace in kinds]
                for size, kinds in self.by_size.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "DryRuns":
        """Read what :meth:`to_json` returned."""
        by_size = {
            int(size): [(share, StepTrace.from_json(trace)) for share, trace in kinds]
            for size, kinds in data["by_size"].items()
        }
        return cls(by_size, data["ranks_per_node"])


def _step(size: int, sizes: Sequence[int], traces: Sequence[StepTrace]) -> StepTrace:
    buckets = zip(*(trace.buckets for trace in traces), strict=True)
    return replace(traces[0], buckets=tuple(_bucket(size, sizes, known) for known in buckets))


def _bucket(size: int, sizes: Sequence[int], known: Sequence[BucketTrace]) -> BucketTrace:
    if len({trace.structure for trace in known}) > 1:
        found = {n: trace.structure for n, trace in zip(sizes, known, strict=True)}
        raise CommHookError(
            f"cannot predict the hook among {size} ranks: its collectives depend on the world "
            f"size, {found}; simulate at most {_LARGEST} ranks"
        )
    exchanges = zip(*(trace.exchanges for trace in known), strict=True)
    return replace(
        _part(size, sizes, known), exchanges=tuple(_part(size, sizes, each) for each in exchanges)
    )


def _part(size: int, sizes: Sequence[int], known: Sequence[_Part]) -> _Part:
    local = zip(*(trace.local_seconds for trace in known), strict=True)
    collectives = zip(*(trace.collectives for trace in known), strict=True)
    return replace(
        known[0],
        local_seconds=tuple(seconds_at(size, sizes, seconds) for seconds in local),
        collectives=tuple(_collective(size, sizes, c) for c in collectives),
    )


def _collective(size: int, sizes: Sequence[int], known: Sequence[Collective]) -> Collective:
    return replace(known[0], tensor_bytes=bytes_at(size, sizes, [c.tensor_bytes for c in known]))
