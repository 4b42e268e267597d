"""Tables of the measurements, for the page of results."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.auto.trainings import AUTO, Point

Entry = Mapping[str, Any]
_LEAST_TURNS = 5
_RESAMPLES = 4000


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its bootstrap interval of 95 %, the same one for the same values."""
    samples = np.random.default_rng(0).choice(np.array(values), (_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(samples, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def point_rows(entry: Entry) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting of a point, the fastest first."""
    settings = entry["settings"]
    blocks = {name: settings[name]["blocks"] for name in settings}  # None: not timed in this turn
    seconds = {
        name: statistics.median(sum(block) / len(block) for block in of if block)
        for name, of in blocks.items()
    }
    uniform = {name for name, setting in settings.items() if "hooks" not in setting} - {AUTO}
    best = min(sorted(uniform), key=seconds.__getitem__)  # in hindsight
    for name in sorted(settings, key=seconds.__getitem__):
        # The time of auto, with its trials and plans, as a share of that of the setting.
        pairs = zip(blocks[AUTO], blocks[name], strict=True)
        median, low, high = median_interval([sum(a) / sum(b) for a, b in pairs if a and b])
        turns = sum(block is not None for block in blocks[name])
        interval = f" ({low:.2f} to {high:.2f})" if turns >= _LEAST_TURNS else ""
        yield {
            "setting": name + (" (the best uniform one)" if name == best else ""),
            "step_seconds": seconds[name],
            "auto_to_it": "" if name == AUTO else f"{median:.2f}{interval}",
            "wire_bytes": settings[name]["wire_bytes"],
            "error": settings[name].get("error"),
            "predicted_seconds": settings[name].get("predicted_seconds"),
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
