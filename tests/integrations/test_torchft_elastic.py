"""Hooks that send once in a while, over a torchft manager, while replicas die and come back."""

import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RUST_LOG", "error")  # read when the lighthouse is loaded
pytest.importorskip("torchft")
from support.elastic_members import (
    HOOKS,
    TIMEOUT,
    check_equal,
    check_return,
    lighthouse,
    plans_of,
    run,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_elastic.py"


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_replicas_train_together(tmp_path: Path, hook: dict[str, Any]) -> None:
    found = run(plans_of(hook, tmp_path, 2, steps=20))
    check_equal(found, hook)
    for each in found.values():
        together = [line["committed"] and line["participants"] == 2 for line in each]
        assert together.count(False) <= 1  # a replica on a busy machine may be taken for dead
        assert each[-1]["wire_bytes"] > 0
        assert len(each) < 20
        assert each[-1]["has_momentum"] == (hook["name"] == "diloco")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_replica_dies_and_comes_back(tmp_path: Path, hook: dict[str, Any], seed: int) -> None:
    dies_at = random.Random(f"{seed}{hook}").randrange(8, 20)
    plans = plans_of(hook, tmp_path, 2, pause=0.02)
    check_return([*plans[:-1], replace(plans[-1], dies_at=dies_at)])


@pytest.mark.parametrize(
    ("hook", "dying_round"),
    [
        ({"name": "diloco", "period": 3, "inner": "dying"}, 2),
        ({"name": "diloco", "period": 6, "fragments": 2, "delay": 2, "inner": "dying"}, 1),
    ],
    ids=["diloco", "delay"],
)
def test_a_replica_dies_in_the_middle_of_an_average(
    tmp_path: Path, hook: dict[str, Any], dying_round: int
) -> None:
    plans = plans_of(hook, tmp_path, 3, pause=0.02)
    last = replace(plans[-1], hook=hook | {"dying_round": dying_round})
    found = check_return([*plans[:-1], last])
    lost = [[line["step"] for line in found[i, 0, 0] if not line["committed"]] for i in range(2)]
    assert lost[0] or lost[1]


def test_a_replica_dies_in_the_first_average(tmp_path: Path) -> None:
    plans = plans_of(HOOKS["delay"], tmp_path, 2, pause=0.02)
    check_return([plans[0], replace(plans[1], dies_at=3)], has_momentum=False)


@pytest.mark.parametrize("name", ["local_sgd", "int8", "delay"])
def test_sharded_replicas_train_together(tmp_path: Path, name: str) -> None:
    found = run(plans_of(HOOKS[name], tmp_path, 2, steps=14, shards=2))
    check_equal(found, HOOKS[name])
    for each in found.values():
        together = [line["committed"] and line["participants"] == 2 for line in each]
        assert together.count(False) <= 1  # a replica on a busy machine may be taken for dead


@pytest.mark.parametrize("name", ["local_sgd", "int8", "delay"])
def test_a_sharded_replica_dies_and_comes_back(tmp_path: Path, name: str) -> None:
    plans = plans_of(HOOKS[name], tmp_path, 2, shards=2, pause=0.02)
    check_return([*plans[:-2], *(replace(plan, dies_at=13) for plan in plans[-2:])])


@contextmanager
def site(number: int, address: str, steps: int) -> Iterator[subprocess.Popen[str]]:
    options = {"site": number, "lighthouse": address, "steps": steps, "print-every": 1}
    options |= {"layers": 1, "width": 16, "block-size": 16, "batch-size": 2}
    command = [sys.executable, str(EXAMPLE), "--hook-option", "period=5"]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        pipesize=1 << 20,  # nobody reads while another site starts
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        timer = threading.Timer(TIMEOUT, process.kill)  # ends what is read from it
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def step_of(process: subprocess.Popen[str], sites: int, *, after: int = 0) -> int:
    """Return the number of the first step that so many sites take together."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.match(r"step (\d+): (\d+) sites, loss \d", line)
        if found and int(found[2]) == sites and int(found[1]) > after:
            return int(found[1])
    raise AssertionError(f"no step of {sites} sites after step {after}")


def test_sites_of_the_example_come_and_go() -> None:
    with lighthouse() as address, site(0, address, 10**9) as stays:
        with site(1, address, 10**9) as dies:
            died_at = step_of(dies, 2, after=20)
        alone_at = step_of(stays, 1, after=died_at)
        with site(1, address, 10**9) as back:
            assert step_of(back, 2) > alone_at
            step_of(stays, 2, after=alone_at)


def test_the_example_ends_and_tells_what_it_has_sent() -> None:
    with lighthouse() as address, site(0, address, 12) as alone:
        output, _ = alone.communicate(timeout=TIMEOUT)
        assert alone.returncode == 0
        assert "step 12: 1 sites" in output
        assert "means per step" in output
