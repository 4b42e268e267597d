"""Statistics of what a hook costs and saves, per bucket and in total."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from commhooks.comm.wire import all_reduce_bytes
from commhooks.costs.units import aligned
from commhooks.runtime.recording import Run
from reducer import GradBucket

KEPT_STEPS = 1000
"""The number of steps that are kept one by one, for statistics of the last ones."""


@dataclass(frozen=True)
class BucketStats:
    """Means over steps, on this rank."""

    index: int | None
    """None for the total."""
    names: tuple[str, ...]
    """The names of the parameters."""
    gradient_bytes: int
    """The size of the gradients in their own dtype."""
    wire_bytes: float | None
    """Bytes sent by this rank (:mod:`commhooks.comm.wire`); None for torch-style functions."""
    ratio: float | None
    """Bytes of the plain average divided by ``wire_bytes``; None if that is None or 0."""
    hook_seconds: float
    """Time from handing the bucket to the hook until its result is there."""
    exposed_seconds: float | None
    """Time that backward only waited for the bucket; None on torch's own wrapper."""

    def scalars(self) -> dict[str, float]:
        """Return the numbers that are known, by name, for loggers."""
        values = {it.name: getattr(self, it.name) for it in fields(self)}
        del values["index"], values["names"]
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class HookStats:
    """Statistics since the hook was registered or replaced, or buckets were last rebuilt.

    Buckets are rebuilt after the first step, so that step is usually left out.
    """

    steps: int
    """The number of steps in the means."""
    total: BucketStats
    """Sums over the buckets. Their hooks overlap, so ``hook_seconds`` counts some time twice."""
    buckets: tuple[BucketStats, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values that the hook itself reports: :meth:`CommHook.metrics`."""
    left_out: int = 0
    """The number of steps before buckets were last rebuilt, which are not in the means."""
    transport: str = "process group"
    """The way that the hook averages: "process group" or "host memory"."""

    @classmethod
    def of(
        cls, steps: int, buckets: Iterable[BucketStats], world_size: int, **others: Any
    ) -> "HookStats":
        """Return the statistics of ``buckets`` with their total; ``others`` are further fields."""
        buckets = tuple(buckets)
        plain = sum(all_reduce_bytes(bucket.gradient_bytes, world_size) for bucket in buckets)
        wire = _sum([bucket.wire_bytes for bucket in buckets])
        total = BucketStats(
            index=None,
            names=tuple(name for bucket in buckets for name in bucket.names),
            gradient_bytes=sum(bucket.gradient_bytes for bucket in buckets),
            wire_bytes=wire,
            ratio=plain / wire if wire else None,
            hook_seconds=math.fsum(bucket.hook_seconds for bucket in buckets),
            exposed_seconds=_sum([bucket.exposed_seconds for bucket in buckets]),
        )
        return cls(steps, total, buckets, **others)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a row per bucket and one for the total, for ``pandas.DataFrame(rows)``.

        The values have types of JSON. The columns are ``bucket`` (its index, or "total"), ``steps``
        (the number of steps in the means), and the fields of :class:`BucketStats`: ``names``,
        ``gradient_bytes``, ``wire_bytes``, ``ratio``, ``hook_seconds``, ``exposed_seconds``. Values
        that are not known are None.
        """
        return [self._row(bucket) for bucket in (*self.buckets, self.total)]

    def _row(self, bucket: BucketStats) -> dict[str, Any]:
        values = asdict(bucket) | {"names": list(bucket.names)}
        index = values.pop("index")
        return {"bucket": "total" if index is None else index, "steps": self.steps, **values}

    def __str__(self) -> str:
        before = f"; {self.left_out} before buckets were rebuilt left out" if self.left_out else ""
        way = "" if self.transport == "process group" else f", through {self.transport}"
        heads = ("bucket", "gradient MB", "wire MB", "ratio", "hook ms", "exposed ms")
        lines = [
            f"means per step over {self.steps} steps{before}{way}",
            aligned([heads, *map(_cells, (*self.buckets, self.total))], left=()),
        ]
        return "\n".join(lines + [f"{name}: {value:g}" for name, value in self.metrics.items()])


def bucket_stats(
    world_size: int,
    *,
    index: int,
    names: Iterable[str],
    gradient_bytes: int,
    wire_bytes: float | None,
    hook_seconds: float,
    exposed_seconds: float | None = None,
) -> BucketStats:
    """Return the statistics of one bucket, with its ratio."""
    plain = all_reduce_bytes(gradient_bytes, world_size)
    ratio = plain / wire_bytes if wire_bytes else None
    return BucketStats(
        index, tuple(names), gradient_bytes, wire_bytes, ratio, hook_seconds, exposed_seconds
    )


@dataclass(slots=True)  # many are kept
class _Costs:
    """Sums over the runs of one bucket, in step ``step`` or in all."""

    step: int = 0
    gradient_bytes: int = 0
    wire_bytes: float | None = 0
    hook_seconds: float = 0.0

    def add(self, gradient_bytes: int, wire_bytes: float | None, hook_seconds: float) -> None:
        """Add what a run has cost."""
        self.gradient_bytes += gradient_bytes
        if wire_bytes is None or self.wire_bytes is None:
            self.wire_bytes = None
        else:
            self.wire_bytes += wire_bytes
        self.hook_seconds += hook_seconds


@dataclass
class _Entry:
    """The costs of one bucket."""

    index: int
    names: tuple[str, ...]
    left_out: int = 0
    """Steps before this bucket was made."""
    steps: int = 0
    total: _Costs = field(default_factory=_Costs)
    recent: deque[_Costs] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """The last steps, one by one."""


class StatsCollector:
    """Adds up what the runs of a hook cost, by the key of their bucket.

    Where buckets are parts of units that never change, set ``units``, and call :meth:`begin_step`
    before the buckets of each step. Then a unit's buckets are added up, however many there are.

    Attributes:
        listener: Called with each run, if set.
        units: The parameters that each one shares a unit with, by name.
    """

    def __init__(self) -> None:
        self.listener: Callable[[Run], None] | None = None
        self.units: Mapping[str, tuple[str, ...]] = {}
        self._steps: int | None = None
        self._entries: dict[str, _Entry] = {}
        self._left_out = 0  # steps, of buckets that have been rebuilt

    def begin_step(self) -> None:
        """Count a step, by which all means are taken."""
        self._steps = (self._steps or 0) + 1

    def record(self, run: Run, bucket: GradBucket) -> None:
        """Add one run on ``bucket``. Of an exchange, which began on it, only the bytes count."""
        entry = self._entries.get(self._key(bucket))
        if not run.is_exchange:
            entry = entry or self._open(bucket)
            entry.steps += 1
            step = entry.steps if self._steps is None else self._steps
            if not entry.recent or entry.recent[-1].step != step:
                entry.recent.append(_Costs(step))
            for costs in (entry.total, entry.recent[-1]):
                costs.add(bucket.buffer().nbytes, run.wire_bytes, run.seconds)
        elif entry is not None:
            for costs in (entry.total, entry.recent[-1]):
                costs.add(0, run.wire_bytes, 0.0)
        if self.listener is not None:
            self.listener(run)

    def wire_bytes(self, key: str, last: int) -> float | None:
        """Return the mean of a bucket's last steps, of all if these are not kept.

        None if it is not known.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        steps, costs = self._window(entry, last if 0 < last <= KEPT_STEPS else None)
        return None if costs.wire_bytes is None else costs.wire_bytes / steps

    def stats(self, world_size: int, last: int | None = None) -> HookStats:
        """Return the statistics of the present buckets, of all steps or of the last ones."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.index)
        buckets = []
        steps = 0
        for entry in entries:
            own, costs = self._window(entry, last)
            steps = max(steps, own)
            buckets.append(
                bucket_stats(
                    world_size,
                    index=entry.index,
                    names=entry.names,
                    gradient_bytes=costs.gradient_bytes // own,
                    wire_bytes=None if costs.wire_bytes is None else costs.wire_bytes / own,
                    hook_seconds=costs.hook_seconds / own,
                )
            )
        left_out = self._left_out if last is None else 0
        return HookStats.of(steps or self._steps or 0, buckets, world_size, left_out=left_out)

    def _window(self, entry: _Entry, last: int | None) -> tuple[int, _Costs]:
        """Return the number of the steps, and the sums over them."""
        steps = self._steps or entry.steps
        if last is None:
            return steps, entry.total
        last = min(last, steps, KEPT_STEPS)
        found = _Costs()
        for costs in entry.recent:
            if costs.step > steps - last:
                found.add(costs.gradient_bytes, costs.wire_bytes, costs.hook_seconds)
        return last, found

    def _key(self, bucket: GradBucket) -> str:
        unit = self._unit(bucket)
        return bucket.key if unit is None else unit[0]

    def _unit(self, bucket: GradBucket) -> tuple[str, ...] | None:
        # Names are converted from C++, so ask for them only where they are needed.
        return self.units.get(bucket.names[0]) if self.units else None

    def _open(self, bucket: GradBucket) -> _Entry:
        """Make a new entry, in place of those whose buckets have been rebuilt."""
        unit = self._unit(bucket)
        if unit is not None:
            return self._entries.setdefault(unit[0], _Entry(len(self._entries), unit))
        names = tuple(bucket.names)
        kept = {
            key: entry
            for key, entry in self._entries.items()
            if set(names).isdisjoint(entry.names) and entry.index != bucket.index()
        }
        rebuilt = [entry for key, entry in self._entries.items() if key not in kept]
        self._left_out = max((self._left_out, *(entry.left_out + entry.steps for entry in rebuilt)))
        entry = _Entry(bucket.index(), names, self._left_out)
        self._entries = kept | {bucket.key: entry}
        return entry


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def _cells(bucket: BucketStats) -> tuple[str, ...]:
    def show(value: float | None, scale: float = 1.0, digits: int = 3) -> str:
        return "-" if value is None else f"{value * scale:.{digits}f}"

    return (
        "total" if bucket.index is None else str(bucket.index),
        show(bucket.gradient_bytes, 1e-6),
        show(bucket.wire_bytes, 1e-6),
        show(bucket.ratio, digits=2),
        show(bucket.hook_seconds, 1e3),
        show(bucket.exposed_seconds, 1e3),
    )
