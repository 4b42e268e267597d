"""Measures one point: ``auto`` and what it is compared with, in turn, in the same processes."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.auto import remote
from bench.auto.models import MODELS
from bench.auto.plans import fewest_bytes, random_of_bytes
from bench.auto.points import Effort, Point
from bench.auto.remote import Learned, Metered
from bench.load import busy_seconds, own_seconds
from commhooks.algorithms.adaptive.candidates import DEFAULT_CANDIDATES
from commhooks.cluster import Ranks
from commhooks.cluster.links import ShapedLink, burst_bytes
from commhooks.hook.base import is_lossless
from commhooks.hook.spec import hook_spec
from commhooks.lab.comparison.entry import Entry
from commhooks.planning import Plan
from commhooks.planning.problem import uniform
from commhooks.planning.solver import plan_of, replayed

__all__ = [
    "AUTO",
    "FEWEST_BYTES",
    "RANDOM",
    "REFERENCE",
    "auto_config",
    "errors_of",
    "fixed_config",
    "measure",
    "measure_change",
]

AUTO, FEWEST_BYTES, RANDOM = "auto", "fewest bytes", "random plan"
REFERENCE = "int4"
"""The uniform hook whose error is the limit."""
ALWAYS = ("bf16", REFERENCE)
_SLOW = 2.5
"""Settings that take this many times as long as the fastest are timed in every fourth turn only."""

FAST, SLOW = 10e9, 1e9
_BLOCK, _BLOCKS = 5, 16
"""Steps of each setting in turn after a change of the rate, and how often."""

Config = dict[str, Any]
Row = dict[str, Any]


def auto_config(model: str, effort: Effort) -> Config:
    """Return the config of ``auto`` for a model."""
    config: Config = {"name": "auto", "exact": list(MODELS[model].exact)}
    if effort.candidates != DEFAULT_CANDIDATES:
        config["candidates"] = [spec for spec in effort.candidates if spec != "allreduce"]
    return config


def fixed_config(model: str, plan: Plan) -> Config:
    """Return the config of ``auto`` with a plan that stays."""
    return {"name": "auto", "exact": list(MODELS[model].exact), "plan": plan.to_json()}


def errors_of(model: str, size: int, specs: Sequence[str], effort: Effort) -> dict[str, float]:
    """Return the error of each hook alone, as the median over steps.

    Over loopback, because the link does not change it.
    """
    found = {}
    with Ranks(size) as ranks:
        ranks(remote.prepare, model)
        for spec in specs:
            parsed = hook_spec(spec)
            found[spec] = 0.0
            if not is_lossless(parsed.create()):
                ranks(remote.add, Metered(spec, parsed.config))
                ranks(remote.seconds, spec, effort.error_after)
                errors = ranks(remote.errors, spec, effort.error_steps)[0]
                ranks(remote.drop, spec)
                found[spec] = statistics.median(errors)
    return found


def measure(
    point: Point, errors: Mapping[str, float], effort: Effort, plans: Mapping[str, Plan]
) -> Row:
    """Measure a point.

    ``errors``: of the uniform settings; those beyond the limit are left out. ``plans``: others to
    compare with.
    """
    with point.link() as link, Ranks(point.ranks, link) as ranks:
        parameters = ranks(remote.prepare, point.model)[0]
        load = [os.getloadavg()[0]]
        before = _loads(ranks)
        ranks(remote.add, Metered(AUTO, auto_config(point.model, effort)))
        warm_up = slowest(ranks, AUTO, effort.warm_up)
        learned = ranks(remote.learned, AUTO)[0]
        settings: dict[str, Row] = {AUTO: {}}
        for spec in effort.settings:
            if errors[spec] <= errors[REFERENCE]:
                ranks(remote.add, Entry(spec, hook_spec(spec).config))
                settings[spec] = {"error": errors[spec]}
        for name, plan in (_other_plans(learned) | plans).items():
            ranks(remote.add, Metered(name, fixed_config(point.model, plan)))
            settings[name] = {"hooks": _shares(plan), "predicted_error": plan.error}
        in_rounds = _take_turns(ranks, settings, effort)
        others = _others(before, _loads(ranks))
        load.append(os.getloadavg()[0])
        learned = ranks(remote.learned, AUTO)[0]
        for name in (AUTO, FEWEST_BYTES, RANDOM, *plans):
            if name in settings:
                measured = ranks(remote.errors, name, effort.error_steps)[0]
                settings[name]["error"] = statistics.median(measured)
        _add_predictions(settings, learned)
    return {
        "point": asdict(point),
        "parameters": parameters,
        "effort": asdict(effort),
        "settings": settings,
        "auto": {
            "warm_up_seconds": warm_up,
            "history": learned.history,
            "metrics": learned.metrics,
            "hooks": _shares(learned.plan),
            "reason": learned.plan.reason,
            "planning_share": learned.planning_seconds
            / (sum(warm_up) + sum(sum(block) for block in in_rounds[AUTO])),
        },
        "load": load,
        "others": others,
    }


def _take_turns(ranks: Ranks, settings: dict[str, Row], effort: Effort) -> dict[str, Any]:
    """Time all settings, block by block. The first block of each is not counted.

    Each gets ``blocks``: for each turn the seconds of its steps, or None if it was left out.
    """
    blocks: dict[str, list[list[float] | None]] = {name: [] for name in settings}
    bytes_before = {}
    warm = {name: sum(slowest(ranks, name, effort.block_steps)) for name in settings}
    for name in settings:
        bytes_before[name] = ranks(remote.sent, name)[0]
    slow = {name for name, each in warm.items() if each > _SLOW * min(warm.values())}
    slow -= {AUTO, *ALWAYS}
    names = list(settings)
    for turn in range(effort.blocks):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            is_left_out = name in slow and turn % 4
            block = None if is_left_out else slowest(ranks, name, effort.block_steps)
            blocks[name].append(block)
    for name, row in settings.items():
        steps, nbytes = (
            now - then
            for now, then in zip(ranks(remote.sent, name)[0], bytes_before[name], strict=True)
        )
        row["blocks"] = blocks[name]
        row["wire_bytes"] = nbytes / steps
    return {name: [block for block in each if block] for name, each in blocks.items()}


def _other_plans(learned: Learned) -> dict[str, Plan]:
    problem = learned.problem
    if problem is None:
        return {}
    least = plan_of(problem, fewest_bytes(problem), "Sends least within the limit.")
    nbytes = learned.plan.wire_bytes
    drawn = plan_of(problem, random_of_bytes(problem, nbytes, 0), "Random, with as many bytes.")
    return {FEWEST_BYTES: least, RANDOM: drawn}


def _add_predictions(settings: dict[str, Row], learned: Learned) -> None:
    problem = learned.problem
    if problem is None:
        return
    settings[AUTO]["predicted_seconds"] = learned.plan.after.step_seconds
    for i, spec in enumerate(problem.hooks):
        if spec in settings:
            timing = replayed(problem, uniform(problem, i))
            settings[spec]["predicted_seconds"] = timing.step_seconds


def _shares(plan: Plan) -> dict[str, float]:
    """Return the share of the parameters that each hook has."""
    found: dict[str, float] = {}
    for row in plan.rows:
        found[row.hook] = found.get(row.hook, 0.0) + row.elements / plan.elements
    return found


def slowest(ranks: Ranks, name: str, steps: int) -> list[float]:
    """Train, and return the seconds of each step on the slowest rank."""
    return [max(each) for each in zip(*ranks(remote.seconds, name, steps), strict=True)]


def _loads(ranks: Ranks) -> tuple[float, float, float]:
    """Return the time, and the CPU seconds so far of this machine and of these processes."""
    pids = [os.getpid(), *ranks(remote.pid)]
    return os.times().elapsed, busy_seconds(), own_seconds(pids)


def _others(before: tuple[float, ...], after: tuple[float, ...]) -> float:
    """Return the cores that other processes have used in between."""
    wall, busy, own = (now - then for now, then in zip(after, before, strict=True))
    return max(0.0, busy - own) / wall


def measure_change(model: str, effort: Effort) -> dict[str, Any]:
    """Change the rate of the link twice while ``auto`` trains, in turn with the right plan of each.

    Return the seconds of each step after the changes.
    """
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
