"""What ``auto`` does when the rate of the link changes while it trains.

::

    fast, then slow      learn the right plan of each: a new auto, whose plan then stays
    fast ► slow ► fast   train with auto, in turn with the right plan of the moment
"""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from typing import Any

from bench.auto import remote
from bench.auto.measure import AUTO, auto_config, fixed_config, slowest
from bench.auto.points import Effort, Point
from commhooks.cluster import Ranks
from commhooks.cluster.links import ShapedLink, burst_bytes
from commhooks.lab.comparison.entry import Entry

__all__ = ["FAST", "SLOW", "measure_change"]

FAST, SLOW = 10e9, 1e9
_BLOCK = 5
_BLOCKS = 16
"""After each change, of either setting."""


def measure_change(model: str, effort: Effort) -> dict[str, Any]:
    """Change the rate twice. Return the seconds of each step after the changes."""
    point = Point(model, FAST)
    with point.link() as link, Ranks(point.ranks, link) as ranks:
        assert link is not None
        ranks(remote.prepare, model)
        right = {}
        for rate in (SLOW, FAST):
            _set_rate(link, rate)
            name = f"right at {rate:g}"
            ranks(remote.add, Entry(name, auto_config(model, effort)))
            slowest(ranks, name, effort.warm_up)
            right[rate] = ranks(remote.learned, name)[0].plan
            ranks(remote.drop, name)
        ranks(remote.add, Entry(AUTO, auto_config(model, effort)))
        slowest(ranks, AUTO, effort.warm_up)
        changes = []
        for rate in (SLOW, FAST):
            name = f"fixed at {rate:g}"
            ranks(remote.add, Entry(name, fixed_config(model, right[rate])))
            slowest(ranks, name, _BLOCK)
            _set_rate(link, rate)
            turns = [
                {"auto": slowest(ranks, AUTO, _BLOCK), "right": slowest(ranks, name, _BLOCK)}
                for _ in range(_BLOCKS)
            ]
            changes.append({"bits_per_second": rate, "turns": turns})
        history = ranks(remote.learned, AUTO)[0].history
    return {"point": asdict(point), "warm_up": effort.warm_up, "changes": changes} | {
        "block_steps": _BLOCK,
        "history": history,
    }


def _set_rate(link: ShapedLink, bits_per_second: float) -> None:
    burst = f"{burst_bytes(bits_per_second):.0f}"
    shape = ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", burst, "latency", "50ms"]
    for prefix in link.prefixes:
        command = [*prefix, "tc", "qdisc", "change", "dev", link.interface, "root", *shape]
        subprocess.run(command, check=True)
