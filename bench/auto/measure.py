"""Measures one point: ``auto`` and what it is compared with, in turn, in the same processes."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from bench.auto import remote
from bench.auto.models import MODELS
from bench.load import busy_seconds, own_seconds
from commhooks.algorithms.adaptive.choices import DEFAULT_CANDIDATES
from commhooks.cluster import Ranks
from commhooks.cluster.links import ShapedLink, shaped_link
from commhooks.costs.units import format_rate
from commhooks.hook.base import is_lossless
from commhooks.hook.spec import hook_spec
from commhooks.planning import Plan

AUTO = "auto"
REFERENCE = "int4"
"""The uniform hook whose error is the limit."""
ALWAYS = ("bf16", REFERENCE)
_SLOW = 2.5
"""Settings that take this many times as long as the fastest are timed in every fourth turn only."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    """Of ``auto``."""
    settings: tuple[str, ...] = DEFAULT_CANDIDATES
    """The uniform settings that it is compared with."""
    warm_up: int = 120
    """Steps of ``auto`` before it is timed. The first plan is in use after about 18."""
    blocks: int = 5
    """Of each setting, in turn."""
    block_steps: int = 6
    """At least 3, or most steps of ``auto`` follow a pause, during which it believes to train. The
    models of the other settings are in the caches at first, so messages seem slower."""
    error_steps: int = 4
    error_after: int = 15
    """Steps before the error of a uniform setting is measured."""


@dataclass(frozen=True)
class Point:
    """A model on some ranks, with a link each. ``bits_per_second``: 0 for loopback."""

    model: str
    bits_per_second: float
    ranks: int = 2

    @property
    def name(self) -> str:
        """For the command line: ``gpt-100mbit-2``."""
        place = self.place.replace(" ", "").replace("/s", "").lower()
        return f"{self.model}-{place}-{self.ranks}"

    @property
    def place(self) -> str:
        """For tables."""
        return format_rate(self.bits_per_second) if self.bits_per_second else "loopback"

    def link(self) -> AbstractContextManager[ShapedLink | None]:
        """Make the hosts."""
        rate = self.bits_per_second
        return shaped_link(self.ranks, rate) if rate else nullcontext()


POINTS = (
    *(Point(model, rate) for rate in (1e8, 1e9, 1e10) for model in ("gpt", "lstm", "resnet")),
    Point("gpt", 1e8, 4),
    Point("gpt", 1e9, 4),
)
_FEW = ("allreduce", "bf16", "int4")
QUICK = Effort(_FEW, _FEW, warm_up=12, blocks=2, error_steps=1, error_after=1)
"""For a test: shows that it works, and nothing else."""


def errors_of(model: str, size: int, specs: Sequence[str], effort: Effort) -> dict[str, float]:
    """Return the error of each hook alone, as the median over steps.

    Over loopback, because the link does not change it.
    """
    found = dict.fromkeys(specs, 0.0)
    with Ranks(size) as ranks:
        ranks(remote.prepare, model)
        for spec in specs:
            parsed = hook_spec(spec)
            if not is_lossless(parsed.create()):
                ranks(remote.add, spec, parsed.config, True)
                ranks(remote.seconds, spec, effort.error_after)
                found[spec] = _error(ranks, spec, effort)
                ranks(remote.drop, spec)
    return found


def measure(
    point: Point, errors: Mapping[str, float], effort: Effort, plans: Mapping[str, Plan]
) -> Row:
    """Measure a point.

    ``errors``: of the uniform settings; those beyond the limit are left out. ``plans``: others to
    compare with.
    """
    config: dict[str, Any] = {"name": "auto", "exact": list(MODELS[point.model].exact)}
    own = dict(config)
    if effort.candidates != DEFAULT_CANDIDATES:
        own["candidates"] = [spec for spec in effort.candidates if spec != "allreduce"]
    with point.link() as link, Ranks(point.ranks, link) as ranks:
        parameters = ranks(remote.prepare, point.model)[0]
        before = _loads(ranks)
        ranks(remote.add, AUTO, own, True)
        warm_up = _slowest(ranks, AUTO, effort.warm_up)
        settings: dict[str, Row] = {AUTO: {}}
        for spec in effort.settings:
            if errors[spec] <= errors[REFERENCE]:
                ranks(remote.add, spec, hook_spec(spec).config, False)
                settings[spec] = {"error": errors[spec]}
        for name, plan in plans.items():
            ranks(remote.add, name, config | {"plan": plan.to_json()}, True)
            settings[name] = {"hooks": _shares(plan), "predicted_error": plan.error}
        _take_turns(ranks, settings, effort)
        wall, busy, used = (now - then for now, then in zip(_loads(ranks), before, strict=True))
        plan, history, metrics, planning_seconds = ranks(remote.learned, AUTO)[0]
        for name in (AUTO, *plans):
            settings[name]["error"] = _error(ranks, name, effort)
    settings[AUTO]["predicted_seconds"] = plan.after.step_seconds
    trained = sum(warm_up) + sum(map(sum, settings[AUTO]["blocks"]))
    return {
        "point": asdict(point),
        "parameters": parameters,
        "effort": asdict(effort),
        "settings": settings,
        "auto": {
            "warm_up_seconds": warm_up,
            "history": history,
            "metrics": metrics,
            "hooks": _shares(plan),
            "reason": plan.reason,
            "planning_share": planning_seconds / trained,
        },
        "others": max(0.0, busy - used) / wall,
    }


def _take_turns(ranks: Ranks, settings: dict[str, Row], effort: Effort) -> None:
    """Time all settings, block by block. The first block of each is not counted.

    Each gets ``blocks``: for each turn the seconds of its steps, or None if it was left out.
    """
    warm = {name: sum(_slowest(ranks, name, effort.block_steps)) for name in settings}
    sent = {name: ranks(remote.sent, name)[0] for name in settings}
    slow = {name for name, each in warm.items() if each > _SLOW * min(warm.values())}
    slow -= {AUTO, *ALWAYS}
    names = list(settings)
    for row in settings.values():
        row["blocks"] = []
    for turn in range(effort.blocks):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            is_left_out = name in slow and turn % 4
            block = None if is_left_out else _slowest(ranks, name, effort.block_steps)
            settings[name]["blocks"].append(block)
    for name, row in settings.items():
        now = ranks(remote.sent, name)[0]
        steps, nbytes = (after - then for after, then in zip(now, sent[name], strict=True))
        row["wire_bytes"] = nbytes / steps


def _slowest(ranks: Ranks, name: str, steps: int) -> list[float]:
    """Train, and return the seconds of each step on the slowest rank."""
    return [max(each) for each in zip(*ranks(remote.seconds, name, steps), strict=True)]


def _error(ranks: Ranks, name: str, effort: Effort) -> float:
    """Train, and return the median error of a step's average."""
    return statistics.median(ranks(remote.errors, name, effort.error_steps)[0])


def _shares(plan: Plan) -> dict[str, float]:
    """Return the share of the parameters that each hook has."""
    found: Counter[str] = Counter()
    for row in plan.rows:
        found[row.hook] += row.elements
    return {hook: elements / plan.elements for hook, elements in found.items()}


def _loads(ranks: Ranks) -> tuple[float, float, float]:
    """Return the time, and the CPU seconds so far of this machine and of these processes."""
    return os.times().elapsed, busy_seconds(), own_seconds([os.getpid(), *ranks(remote.pid)])
