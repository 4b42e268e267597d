"""`make gpu-check` keeps what it found, whatever becomes of a stage."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
import torch
from support.dying_ranks import DyingRanks
from support.processes import is_running, wait_until

from bench.gpu import check, deaths, machine, page
from bench.gpu.check import Stage, StageResult, run_stage
from bench.gpu.page import sections

HANGS = ("sh", "-c", "sleep 600 & echo child $!; wait")  # it starts within milliseconds


def test_a_stage_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    stage = Stage("hangs", HANGS, limit_seconds=5)
    result = run_stage(stage, stage.limit_seconds, tmp_path / "log", tmp_path)
    assert result.status == "timed out"
    assert result.is_bad
    child = int(result.last_line.split()[1])
    wait_until(lambda: not is_running(child))


def test_status_and_output(tmp_path: Path) -> None:
    fails = Stage(
        "fails",
        (sys.executable, "-c", "import os; print(os.environ['WORD']); raise SystemExit(3)"),
        limit_seconds=60,
        environment={"WORD": "found"},
    )
    result = run_stage(fails, 60, tmp_path / "log", tmp_path)
    assert (result.status, result.last_line) == ("failed", "found")
    passes = Stage("passes", (sys.executable, "-c", ""), limit_seconds=60)
    assert run_stage(passes, 60, tmp_path / "log", tmp_path).status == "passed"


def test_what_a_machine_does_not_allow_is_left_out(tmp_path: Path) -> None:
    words = "import sys; sys.exit('Error: Device not supported. Please refer to the manual')"
    stage = Stage("memcheck", (sys.executable, "-c", words), limit_seconds=60)
    assert run_stage(stage, 60, tmp_path / "log", tmp_path).status == "left out"


def test_a_check_that_takes_long_may_end_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage("slow", HANGS, limit_seconds=5, may_time_out=True)
    result = run_stage(stage, 5, tmp_path / "slow.log", tmp_path)
    assert result.status == "left out"
    assert result.last_line.startswith("not finished after 5 s: child ")
    monkeypatch.setattr(check, "WORK", tmp_path)
    check.save({"stages": [], "benchmarks": []}, result, tmp_path / "kept")
    assert (tmp_path / "kept-slow.log").read_text().startswith("child ")


TESTS = """
import time


def test_short():
    pass


def test_long():
    time.sleep(600)


def test_never():
    pass
"""


def test_a_stage_that_is_cut_off_says_which_tests_it_has_not_done(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    stage = Stage("tests", (*check.PYTEST, str(tmp_path), "-p", "no:xdist"), 20, may_time_out=True)
    result = run_stage(stage, 20, tmp_path / "tests.log", check.ROOT)
    assert result.status == "left out"
    assert result.not_done == ("test_long", "test_never")
    assert "2 tests not done: " in result.last_line
    assert "KeyboardInterrupt" in (tmp_path / "tests.log").read_text()  # it has ended by itself


def collect(stage: Stage) -> tuple[int, str]:
    """Collect the tests of a stage, with the options of the check; return how pytest ends."""
    arguments = stage.command[stage.command.index("pytest") + 1 :]
    command = [sys.executable, "-m", "pytest", *arguments, "--collect-only", "-q"]
    run = subprocess.run(command, cwd=check.ROOT, capture_output=True, text=True, check=False)
    return run.returncode, (run.stdout.strip().splitlines() or [run.stderr])[-1]


@pytest.mark.exhaustive  # collects the tests of each stage in another process
@pytest.mark.timeout(900)
def test_there_are_tests_for_every_stage() -> None:
    """With the options of the check, which configures pytest in a folder below the tests."""
    planned = check.stages()
    check.WORK.mkdir(parents=True, exist_ok=True)
    assert {"build", "kernels", "bench steps", "conformance", "streams", "racecheck"} <= {
        stage.name for stage in planned
    }
    found = {stage.name: collect(stage) for stage in planned if "pytest" in stage.command}
    assert len(found) == 13
    for stage, (code, last_line) in found.items():
        assert code == 0, (stage, last_line)
        assert re.search(r"\d+ tests collected", last_line), (stage, last_line)


def test_a_stage_without_tests_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").touch()
    code, last_line = collect(Stage("empty", (*check.PYTEST, str(tmp_path)), 10))
    assert code != 0
    assert "no tests collected" in last_line


@dataclass
class Clock:
    """Stages that take three seconds each, without running anything."""

    bad: tuple[str, ...] = ()
    now: float = 0.0
    limits: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def run(self, stage: Stage, limit_seconds: float, log: Path, directory: Path) -> StageResult:
        log.write_text(f"log of {stage.name}")
        self.now += 3
        self.limits.append(limit_seconds)
        return StageResult(stage.name, "failed" if stage.name in self.bad else "passed", 3.0, "end")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    clock = Clock()
    monkeypatch.setattr(check, "run_stage", clock.run)
    monkeypatch.setattr(check.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(check, "LEAST_SECONDS", 2.0)
    monkeypatch.setattr(check, "WORK", tmp_path / "work")
    return clock


def test_a_stage_gets_its_limit_or_the_time_that_is_left(clock: Clock, tmp_path: Path) -> None:
    planned = [Stage(name, (), 5.0) for name in ("one", "two", "three", "four")]
    results = list(check.run_all(planned, 10.0, tmp_path))
    assert clock.limits == [5, 5, 4]
    assert [result.status for result in results] == ["passed", "passed", "passed", "left out"]
    assert results[-1].last_line == "no time is left"


def test_a_failure_does_not_end_the_others_but_for_the_build(clock: Clock, tmp_path: Path) -> None:
    planned = [Stage(name, (), 5.0) for name in ("build", "tests", "conformance")]
    clock.bad = ("tests",)
    statuses = [result.status for result in check.run_all(planned, 60.0, tmp_path)]
    assert statuses == ["passed", "failed", "passed"]
    clock.bad = ("build",)
    results = list(check.run_all(planned, 60.0, tmp_path))
    assert [result.status for result in results] == ["failed", "left out", "left out"]
    assert results[1].last_line == "nothing was built"


def test_what_a_stage_needs_and_the_machine_lacks_is_left_out(clock: Clock, tmp_path: Path) -> None:
    planned = [Stage("odd", (), 5.0, needs=("no-such-package",)), Stage("tests", (), 5.0)]
    odd, tests = check.run_all(planned, 60.0, tmp_path)
    assert odd == StageResult("odd", "left out", 0.0, "no no-such-package")
    assert tests.status == "passed"


def test_the_check_ends_in_time_and_builds_first() -> None:
    """Nine minutes for all, four for a part; the time-outs of children add little."""
    assert check.SECONDS <= 525
    planned = check.stages()
    assert all(stage.limit_seconds + check.GRACE_SECONDS <= 245 for stage in planned)
    first = [
        "build",
        "kernels",
        "tests",
        "2 ranks",
        "4 ranks",
        "graphs",
        "deaths",
        "links",
        "conformance nccl",
    ]
    assert [stage.name for stage in planned[: len(first)]] == first


def end(die: Callable[[], None]) -> None:
    die()
    print("last words", *range(100), sep="\n", flush=True)
    os._exit(7)


def test_deaths_of_ranks() -> None:
    """What is measured over NCCL, over Gloo; a rank that torch's watchdog ends leaves its words."""
    with DyingRanks(2) as ranks:
        for how in deaths.HOWS:
            # Over Gloo, hooks in Python have groups of their own, whose time-out is another one.
            case = ("host waits", how, "allreduce" if how == "stopped" else "int8")
            row = deaths.measure(ranks, case, "cpu", "gloo", timeout=1.0)
            assert row["extra_info"]["rank 0"] == "CommHookPeerError", row
        for _ in range(2):  # the rank that ended is replaced
            (ended,) = ranks.run(end)
        assert ended.kind == "exit code 7"
        assert ended.text.startswith("last words\n0\n1\n")
        assert 0 <= ended.seconds < 60
    rows = [row, deaths.row_of(("watchdog", "killed", "int8"), ended)]
    text = "\n".join(sections({"machine": MACHINE, "stages": [PASSED], "benchmarks": rows}))
    assert re.search(r"\| raises, a hook of two collectives, host waits +\| CommHookPeerE", text)
    assert re.search(r"\| killed, int8, watchdog +\| exit code 7 .* last words", text)
    assert "| killed, int8, watchdog | exit code 7 | " in page.deaths(rows)
    assert page.deaths([]) == "Not yet measured."


PASSED = {"name": "deaths", "status": "passed", "seconds": 1.0, "last_line": ""}


def test_files_of_a_run(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Device (80 GB)")
    monkeypatch.setattr(check, "count_workers", lambda: 8)
    monkeypatch.setattr(check, "describe", lambda root: MACHINE)
    monkeypatch.setattr(check, "missing", lambda requirements: [])
    clock.bad = ("bench steps",)
    assert check.main(["--output", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*-a-device-80-gb.json")
    assert path.with_name(f"{path.stem}-bench-steps.log").read_text() == "log of bench steps"
    assert len(list(tmp_path.glob("*.log"))) == 1
    names = [stage["name"] for stage in json.loads(path.read_text())["stages"]]
    assert names == [stage.name for stage in check.stages()]
    clock.bad = ()
    assert check.main(["--output", str(tmp_path)]) == 0
    assert len(json.loads(path.read_text())["stages"]) == len(names)  # begins anew
    clock.bad = ("streams",)
    assert check.main(["--output", str(tmp_path), "--part", "streams", "--part", "tests"]) == 1
    found = {row["name"]: row["status"] for row in json.loads(path.read_text())["stages"]}
    assert list(found) == names
    assert [name for name, status in found.items() if status != "passed"] == ["streams"]
    text = "\n".join(sections(json.loads(path.read_text())))
    assert text.startswith("A device, Python 3.12, torch 2.11.0.")
    assert "| bench steps" in text


MACHINE = {
    "devices": ["A device"],
    "driver": None,
    "nvcc": None,
    "cuda": None,
    "nccl": None,
    "python": "3.12",
    "versions": {"torch": "2.11.0", "cupy": None},
    "commit": None,
}


def test_a_part_of_other_code_begins_anew(clock: Clock, tmp_path: Path) -> None:
    """What a part has not begun when it is cut off is in its file."""
    check.WORK.mkdir()
    planned = [Stage("one", (), 5.0), Stage("two", (), 5.0)]
    target = tmp_path / "2026-01-01-a-device"
    run = check.begin(planned, MACHINE | {"device_code": "a"}, target)
    check.save(run, StageResult("one", "passed", 1.0, "end"), target)
    rows = json.loads(target.with_suffix(".json").read_text())["stages"]
    assert [row["last_line"] for row in rows] == ["end", "not begun"]
    run = check.begin(planned[1:], MACHINE | {"device_code": "a"}, target)
    assert [row["name"] for row in run["stages"]] == ["one", "two"]
    figures = check.WORK / "test_gpu_steps.json"
    figures.write_text(json.dumps({"benchmarks": [{"group": "g", "name": "n", "extra_info": {}}]}))
    check.save(run, StageResult("two", "passed", 1.0, "end"), target)
    assert len(run["benchmarks"]) == 1
    run = check.begin(planned[1:], MACHINE | {"device_code": "b"}, target)
    check.save(run, StageResult("two", "passed", 1.0, "end"), target)
    assert [row["name"] for row in run["stages"]] == ["two"]
    assert run["benchmarks"] == []  # those of other code


def test_what_is_missing_or_too_old_is_named() -> None:
    assert machine.missing(["no-such-package", "torch"]) == ["no no-such-package"]
    assert machine.missing(["torch>=2.11", "setuptools>=65.5"]) == []
    found = metadata.version("torch")
    assert machine.missing(["torch>=2.99"]) == [f"torch {found}, expected >=2.99"]


def test_a_cupy_for_another_cuda_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "cupy-cuda12x":
            raise metadata.PackageNotFoundError(name)
        return "14.2.0"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert machine.missing(["cupy>=13"]) == []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert machine.missing(["cupy>=13"]) == ["no cupy-cuda13x"]


def test_the_last_line_is_what_pytest_says(tmp_path: Path) -> None:
    for output, last_line in {"x\n=== 3 passed ===\n": "3 passed", "": ""}.items():
        stage = Stage("tests", (sys.executable, "-c", f"print({output!r})"), limit_seconds=60)
        assert run_stage(stage, 60, tmp_path / "log", tmp_path).last_line == last_line


def test_an_outcome_that_was_left_out_is_not_bad() -> None:
    assert not StageResult("memcheck", "left out", 0.0, "").is_bad
