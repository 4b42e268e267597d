"""What the measurements say, for the page of results."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.auto.measure import AUTO, Point

Row = dict[str, Any]
Entry = Mapping[str, Any]
_LEAST_TURNS = 5
_RESAMPLES = 4000
_CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A median, and the ends of its interval of 95 %."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median and its bootstrap interval, the same one for the same values."""
    draw = np.random.default_rng(0)
    samples = draw.choice(np.array(values), (_RESAMPLES, len(values)))
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(np.median(samples, axis=1), [tail, 1 - tail])
    return Interval(float(low), float(np.median(values)), float(high))


def point_rows(entry: Entry) -> Iterator[Row]:
    """Yield a row for each setting of a point, the fastest first."""
    best, settings = _best_uniform(entry), entry["settings"]
    for name in sorted(settings, key=lambda name: _seconds(entry, name)):
        setting, ratio = settings[name], _ratio(entry, name)
        turns = sum(block is not None for block in setting["blocks"])
        text = str(ratio) if turns >= _LEAST_TURNS else f"{ratio.median:.2f}"
        yield {
            "setting": name + (" (the best uniform one)" if name == best else ""),
            "step_seconds": _seconds(entry, name),
            "auto_to_it": "" if name == AUTO else text,
            "wire_bytes": setting["wire_bytes"],
            "error": setting.get("error"),
            "predicted_seconds": setting.get("predicted_seconds"),
            "turns": turns,
        }


def title(entry: Entry) -> str:
    """Return what was measured."""
    point = Point(**entry["point"])
    millions = entry["parameters"] / 1e6
    return f"{point.model}, {millions:.1f} million parameters, {point.ranks} ranks, {point.place}"


def circumstances(entry: Entry) -> str:
    """Return what the machine did besides, and what planning took and chose."""
    auto = entry["auto"]
    shares = sorted(auto["hooks"].items(), key=lambda each: -each[1])
    hooks = ", ".join(f"`{hook}` {share:.0%}" for hook, share in shares) or "all exact"
    first = auto["history"][0]["step"] if auto["history"] else None
    return (
        f"Other processes used {entry['others']:.1f} cores meanwhile. `auto` made its first plan "
        f"in step {first}, and {len(auto['history'])} plans in all; measuring and planning took "
        f"{auto['planning_share']:.1%} of its time. Its last plan, by parameters: {hooks}."
    )


def summary_of(entry: Entry) -> str:
    """Return a line for the terminal."""
    others = (f"{name} {_ratio(entry, name)}" for name in entry["settings"] if name != AUTO)
    return (
        f"{Point(**entry['point']).name}: auto {_seconds(entry, AUTO):.3f} s, best uniform "
        f"{_best_uniform(entry)}; auto to {', '.join(others)}"
    )


def _ratio(entry: Entry, name: str) -> Interval:
    """Return the time of ``auto``, trials and plans included, as a share of that of a setting.

    The median over turns in which both were timed.
    """
    own, other = (entry["settings"][each]["blocks"] for each in (AUTO, name))
    pairs = zip(own, other, strict=True)
    return median_interval([sum(a) / sum(b) for a, b in pairs if a and b])


def _best_uniform(entry: Entry) -> str:
    """Return the uniform setting within the limit whose steps were shortest, in hindsight."""
    uniform = {name for name, row in entry["settings"].items() if "hooks" not in row} - {AUTO}
    return min(sorted(uniform), key=lambda name: _seconds(entry, name))


def _seconds(entry: Entry, name: str) -> float:
    blocks = [block for block in entry["settings"][name]["blocks"] if block]
    return statistics.median(sum(block) / len(block) for block in blocks)
