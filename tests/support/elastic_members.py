"""Runs replicas of :mod:`support.elastic_replica`, of which some die and come back."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from torchft.coordination import LighthouseServer

from support import elastic_replica
from support.elastic_replica import Plan

TIMEOUT = 240.0
TOGETHER = 4
"""Steps in which all have to take part before a run may end."""

INT8 = {"name": "int8", "error_feedback": True}
TOPK = {"name": "topk", "density": 0.1, "error_feedback": False}
FEEDBACK = {"name": "error_feedback", "inner": TOPK}
POWERSGD = {"name": "powersgd", "rank": 2, "start_step": 0, "min_compression_rate": 1.0}
HOOKS: dict[str, dict[str, Any]] = {
    "local_sgd": {"name": "local_sgd", "period": 3},
    "post_local_sgd": {"name": "local_sgd", "period": 3, "start_step": 4},
    "diloco": {"name": "diloco", "period": 4},
    "int8": {"name": "diloco", "period": 3, "inner": INT8},
    "powersgd": {"name": "diloco", "period": 3, "inner": POWERSGD},
    "fragments": {"name": "diloco", "period": 6, "fragments": 3, "inner": FEEDBACK},
    "delay": {"name": "diloco", "period": 6, "fragments": 2, "delay": 2, "inner": INT8},
    "overlap": {"name": "diloco", "period": 6, "fragments": 3, "delay": 5, "merge": 0.5},
}


Found: TypeAlias = dict[tuple[int, int, int], list[dict[str, Any]]]
"""Lines by replica, life and shard."""


@contextmanager
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=10_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=5_000,
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


@contextmanager
def started(plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, elastic_replica.__file__, json.dumps(asdict(plan))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with (
        plan.path.with_suffix(".txt").open("wb") as output,
        subprocess.Popen(command, env=environment, stderr=output) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def lines(plan: Plan) -> list[dict[str, Any]]:
    text = plan.path.read_text() if plan.path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def run(plans: list[Plan]) -> Found:
    """Run replicas, of which the last may die, and then comes back. Return what they wrote."""
    with lighthouse() as address, ExitStack() as stack:
        plans = [replace(plan, lighthouse=address) for plan in plans]
        processes = [stack.enter_context(started(plan)) for plan in plans]
        if not plans[-1].steps:
            dead = plans[-plans[-1].shards :]
            for process in processes[-len(dead) :]:
                assert process.wait(TIMEOUT) == -signal.SIGKILL, output(plans)
            # Who is back sooner than its heartbeat times out is never missed.
            wait_for(lambda: all(map(has_gone_on, plans[: -len(dead)])), plans, processes[0])
            backs = [replace(each, life=1, dies_at=-1, hook=alive(each.hook)) for each in dead]
            plans += backs
            processes[-len(dead) :] = [stack.enter_context(started(back)) for back in backs]
            wait_for(
                lambda: sum(line["committed"] for line in lines(backs[-1])) >= TOGETHER,
                plans,
                processes[-1],
            )
            Path(backs[-1].folder, "end").touch()
        for process in processes:
            assert process.wait(TIMEOUT) == 0, output(plans)
    return {(plan.number, plan.life, plan.shard): lines(plan) for plan in plans}


def has_gone_on(plan: Plan) -> bool:
    """Return whether a survivor has gone on without the dead."""
    return any(line["participants"] < plan.replicas for line in lines(plan))


def wait_for(
    condition: Callable[[], bool], plans: list[Plan], process: subprocess.Popen[bytes]
) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, output(plans)
        assert process.poll() is None, output(plans)
        time.sleep(0.05)


def alive(hook: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in hook.items() if name != "dying_round"}


def output(plans: list[Plan]) -> str:
    return "\n".join(plan.path.with_suffix(".txt").read_text() for plan in plans)


def check_equal(found: Found, hook: dict[str, Any]) -> None:
    """Whoever commits a step has what all others have that commit it."""
    steps = defaultdict(list)
    for (_, _, shard), each in found.items():
        for line in each:
            if line["committed"]:
                steps[line["step"], shard].append(line)
    fields = ["participants", "anchors"]
    if hook.get("fragments", 1) == 1 and not hook.get("delay"):
        fields.append("parameters")
    for step, those in steps.items():
        for field in fields:
            assert len({line[field] for line in those}) == 1, (step, field, those)


def plans_of(hook: dict[str, Any], folder: Path, count: int, **others: Any) -> list[Plan]:
    plan = Plan(hook, "", str(folder), count, **others)
    numbers = itertools.product(range(count), range(plan.shards))
    return [replace(plan, number=number, shard=shard) for number, shard in numbers]


def check_return(plans: list[Plan], *, has_momentum: bool = True) -> Found:
    """Check that a death costs survivors one average, and that who is back has what they have."""
    hook, count = plans[0].hook, plans[0].replicas
    found = run(plans)
    check_equal(found, hook)
    back, *_ = [found.pop((count - 1, 1, shard)) for shard in range(plans[0].shards)]
    dead, *_ = [found.pop((count - 1, 0, shard)) for shard in range(plans[0].shards)]
    assert back[0]["step"] > dead[-1]["step"]
    # At the end of a run the others may leave first.
    committed = [line["participants"] for line in back if line["committed"]][:TOGETHER]
    assert committed == [count] * TOGETHER
    if has_momentum:
        assert back[0]["has_momentum"] == (hook["name"] == "diloco")
    for each in found.values():
        steps = [line["step"] for line in each]
        assert steps == sorted(set(steps))
        assert {count - 1, count} <= {line["participants"] for line in each}
        before = [line for line in each if line["step"] < back[0]["step"]]
        assert {line["participants"] for line in before} <= {count - 1, count}
        assert sum(not line["committed"] for line in before) <= 2
    return found
