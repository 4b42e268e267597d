"""`make gpu-check` keeps what it found, whatever becomes of a stage."""

import os
import sys
import time
from pathlib import Path

from bench.gpu import check, machine
from bench.gpu.stages import Outcome, Stage, run_stage

HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_stage_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    stage = Stage("hangs", (sys.executable, "-c", HANGS), limit_seconds=3)
    outcome = run_stage(stage, tmp_path / "log", tmp_path)
    assert outcome.status == "timed out"
    assert outcome.is_bad
    child = int(outcome.tail.split()[1])
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.05)
    os.kill(child, 9)
    raise AssertionError("the child was left behind")


def test_status_and_output(tmp_path: Path) -> None:
    fails = Stage(
        "fails",
        (sys.executable, "-c", "import os; print(os.environ['WORD']); raise SystemExit(3)"),
        limit_seconds=60,
        environment=(("WORD", "found"),),
    )
    outcome = run_stage(fails, tmp_path / "log", tmp_path)
    assert (outcome.status, outcome.tail.strip()) == ("failed", "found")
    passes = Stage("passes", (sys.executable, "-c", ""), limit_seconds=60)
    assert run_stage(passes, tmp_path / "log", tmp_path).status == "passed"


def test_limits_leave_nine_minutes(tmp_path: Path) -> None:
    assert sum(stage.limit_seconds for stage in check.stages(tmp_path)) < 540


def test_table() -> None:
    stage = {"name": "tests", "status": "failed", "seconds": 7.0, "tail": "x\n=== 1 | 2 failed ==="}
    row = {"group": "gpu: pack", "name": "test_large[pack]", "extra_info": {"aim": "a", "ms": 1.5}}
    run = {
        "date": "2026-01-01",
        "machine": machine.describe(check.ROOT),
        "stages": [stage],
        "benchmarks": [row],
    }
    text = check.table(run, "2026-01-01-a-device")
    assert "| tests | failed | 7 | 1 / 2 failed |" in text
    assert "| pack | 1.5 |" in text


def test_what_is_missing_is_named_with_its_purpose() -> None:
    assert machine.missing({"no_such_package": "nothing"}) == ["no_such_package (nothing)"]
    assert machine.missing({"torch": "everything"}) == []


def test_an_outcome_that_was_left_out_is_not_bad() -> None:
    assert not Outcome("memcheck", "left out", 0.0, "").is_bad
