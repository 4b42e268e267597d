"""Measures one point: ``auto`` and what it is compared with, in turn, in the same processes."""

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from bench.auto.models import MODELS
from bench.auto.remote import Training, Trainings, cpu_seconds
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
Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

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
QUICK = Effort(("allreduce", "bf16", REFERENCE), warm_up=40, blocks=2, error_steps=1, error_after=1)
"""For a test: shows that it works, and nothing else."""


def measure(point: Point, effort: Effort, plans: Mapping[str, Plan]) -> Row:
    """Measure a point. ``plans``: others to compare with, by name."""
    config: dict[str, Any] = {"name": AUTO, "exact": list(MODELS[point.model].exact)}
    with point.link() as link, Ranks(point.ranks, link) as ranks:
        ranks.make(Trainings, point.model)
        settings: dict[str, Row] = {AUTO: {}} | _within_the_limit(ranks, effort)
        before = _loads(ranks)
        ranks.do(Trainings.add, AUTO, config)
        warm_up = _slowest(ranks, AUTO, effort.warm_up)
        for name, plan in plans.items():
            ranks.do(Trainings.add, name, config | {"plan": plan.to_json()})
            settings[name] = {"hooks": _shares(plan), "predicted_error": plan.error}
        _take_turns(ranks, settings, effort)
        wall, busy, used = (now - then for now, then in zip(_loads(ranks), before, strict=True))
        plan, history, metrics, planning_seconds = ranks.do(Trainings.do, AUTO, Training.learned)[0]
        for name in (AUTO, *plans):
            settings[name]["error"] = _error(ranks, name, effort)
        parameters = ranks.do(Trainings.parameters)[0]
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


def _within_the_limit(ranks: Ranks, effort: Effort) -> dict[str, Row]:
    """Begin to train with each uniform setting; return those whose errors are within the limit."""
    found: dict[str, Row] = {}
    for spec in effort.settings:
        parsed = hook_spec(spec)
        ranks.do(Trainings.add, spec, parsed.config)
        error = 0.0
        if not is_lossless(parsed.create()):
            ranks.do(Trainings.do, spec, Training.seconds, effort.error_after)
            error = _error(ranks, spec, effort)
        found[spec] = {"error": error}
    beyond = [spec for spec, row in found.items() if row["error"] > found[REFERENCE]["error"]]
    for spec in beyond:
        ranks.do(Trainings.drop, spec)
        del found[spec]
    return found


def _take_turns(ranks: Ranks, settings: dict[str, Row], effort: Effort) -> None:
    """Time all settings, block by block. The first block of each is not counted.

    Each gets ``blocks``: for each turn the seconds of its steps.
    """
    for name, row in settings.items():
        _slowest(ranks, name, effort.block_steps)
        row["blocks"] = []
    sent = {name: ranks.do(Trainings.do, name, Training.sent)[0] for name in settings}
    names = list(settings)
    for turn in range(effort.blocks):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            settings[name]["blocks"].append(_slowest(ranks, name, effort.block_steps))
    for name, row in settings.items():
        now = ranks.do(Trainings.do, name, Training.sent)[0]
        steps, nbytes = (after - then for after, then in zip(now, sent[name], strict=True))
        row["wire_bytes"] = nbytes / steps


def _slowest(ranks: Ranks, name: str, steps: int) -> list[float]:
    """Train, and return the seconds of each step on the slowest rank."""
    return [
        max(each)
        for each in zip(*ranks.do(Trainings.do, name, Training.seconds, steps), strict=True)
    ]


def _error(ranks: Ranks, name: str, effort: Effort) -> float:
    """Train, and return the median error of a step's average."""
    return statistics.median(ranks.do(Trainings.do, name, Training.errors, effort.error_steps)[0])


def _shares(plan: Plan) -> dict[str, float]:
    """Return the share of the parameters that each hook has."""
    found: Counter[str] = Counter()
    for row in plan.rows:
        found[row.hook] += row.elements
    return {hook: elements / plan.elements for hook, elements in found.items()}


def _loads(ranks: Ranks) -> tuple[float, float, float]:
    """Return the time, and the CPU seconds so far of this machine and of these processes."""
    of_machine = psutil.cpu_times()
    busy = sum(of_machine) - of_machine.idle - of_machine.iowait
    return time.monotonic(), busy, time.process_time() + sum(ranks(cpu_seconds))
