"""`make gpu-check` keeps what it found, whatever becomes of a stage."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import check, machine
from bench.gpu.stages import Stage, StageResult, run_stage

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
    stage = Stage("hangs", (sys.executable, "-c", HANGS), limit_seconds=4)
    result = run_stage(stage, stage.limit_seconds, tmp_path / "log", tmp_path)
    assert result.status == "timed out"
    assert result.is_bad
    child = int(result.tail.split()[1])
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
    result = run_stage(fails, 60, tmp_path / "log", tmp_path)
    assert (result.status, result.tail.strip()) == ("failed", "found")
    passes = Stage("passes", (sys.executable, "-c", ""), limit_seconds=60)
    assert run_stage(passes, 60, tmp_path / "log", tmp_path).status == "passed"


def test_what_a_machine_does_not_allow_is_left_out(tmp_path: Path) -> None:
    words = "import sys; sys.exit('Error: Device not supported. Please refer to the manual')"
    stage = Stage("memcheck", (sys.executable, "-c", words), limit_seconds=60)
    assert run_stage(stage, 60, tmp_path / "log", tmp_path).status == "left out"


@pytest.mark.exhaustive  # collects all of them in another process
def test_all_gpu_tests_are_found() -> None:
    """With the options of the check, which configures pytest in a folder below theirs."""
    command = [*check.PYTEST, "-m", "gpu", "--collect-only", "-q", *check.TESTS, check.CONFORMANCE]
    run = subprocess.run(command, cwd=check.ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    for name in ("test_gpu_reducer", "test_gpu_sparse_kernels", "test_block_kernels"):
        assert f"/{name}.py::" in run.stdout


def test_limits_leave_nine_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_sanitizer", lambda: "/usr/bin/compute-sanitizer")
    planned = list(check.stages(tmp_path))
    assert [stage.name for stage in planned].count("memcheck") == 1
    assert sum(stage.limit_seconds for stage in planned) <= 520


def test_results_of_every_stage_and_the_time_that_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def run(stage: Stage, limit_seconds: float, log: Path, directory: Path) -> StageResult:
        limits.append(round(limit_seconds))
        return StageResult(stage.name, "timed out" if stage.name == "two" else "passed", 1.0, "")

    monkeypatch.setattr(check, "run_stage", run)
    planned = [Stage(name, (), 10.0) for name in ("one", "two", "three")]
    found = [[result.name for result in so_far] for so_far in check.run_all(planned, tmp_path)]
    assert found[:3] == [["one"], ["one", "two"], ["one", "two", "three"]]
    assert limits == [10, 20, 30]


def test_nothing_runs_after_a_build_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = StageResult("build", "failed", 1.0, "")
    monkeypatch.setattr(check, "run_stage", lambda *_: failure)
    planned = [Stage(name, (), 10.0) for name in ("build", "tests")]
    *_, last = check.run_all(planned, tmp_path)
    assert [result.status for result in last[:2]] == ["failed", "left out"]


def test_what_is_missing_is_named_with_its_purpose() -> None:
    assert machine.missing({"no_such_package": "nothing"}) == ["no_such_package (nothing)"]
    assert machine.missing({"torch": "everything", "setuptools>=77": "the build"}) == []


def test_a_package_that_is_too_old_is_named() -> None:
    assert machine.missing({"torch>=99": "everything"}) == ["torch>=99 (everything)"]


def test_benches_are_left_out_without_pytest_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options would be an error of usage."""
    passed = StageResult("any", "passed", 1.0, "")
    monkeypatch.setattr(check, "run_stage", lambda *_: passed)
    monkeypatch.setattr(check, "missing", lambda names: list(names))
    planned = list(check.stages(tmp_path))
    assert not any(stage.name.startswith("bench") for stage in planned)
    *_, last = check.run_all(planned, tmp_path)
    left_out = StageResult("benches", "left out", 0.0, "no pytest-benchmark")
    assert left_out in last


def test_an_outcome_that_was_left_out_is_not_bad() -> None:
    assert not StageResult("memcheck", "left out", 0.0, "").is_bad
