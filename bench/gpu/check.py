"""Build, test and measure on a CUDA device: ``python -m bench.gpu.check [--output FOLDER]``.

Takes under nine minutes, without a network, with the Python that runs it and the packages it has.
Apart from the build, stages do not depend on each other; none takes more than four minutes, and one
that hangs is interrupted at its limit, and then killed. What several ranks do on one device comes
first. After every stage FOLDER/<date>-<device>.json is written again, so that an early end leaves
the results so far, with what was not begun or not finished, and a stage that fails or is cut off
leaves its log there. Exits with 1 if anything failed. What the machine does not have is left out.

``--part NAME`` runs one stage only, several times for several, and adds to the results of the day.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu import unfinished
from bench.gpu.machine import NEEDED, SANITIZER, count_workers, describe, find_sanitizer, missing

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu-check"
LINKS = WORK / "links.json"
DEATHS = WORK / "test_gpu_deaths.json"
SECONDS = 520.0
"""The time of the whole check."""
LEAST_SECONDS = 20.0
"""With less time left, no stage is begun."""
GRACE_SECONDS = 15.0
"""From an interrupt to the end of a stage, which may write what it has."""
LOG_BYTES = 200_000
TAIL_CHARACTERS = 3000
# The build folder has the kernels. All ranks are on this machine, whose host name need not resolve.
ENVIRONMENT = {"CUPY_CACHE_DIR": str(WORK / "kernels"), "GLOO_SOCKET_IFNAME": "lo",
               "NCCL_SOCKET_IFNAME": "lo"}  # fmt: skip
# The message of compute-sanitizer on machines that do not permit profiling.
REFUSAL = "Device not supported"

PYTEST = (sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".",
          "--confcutdir", ".", "-p", "no:cacheprovider", "-p", "bench.gpu.unfinished")  # fmt: skip
CONFORMANCE = "tests/gpu/test_gpu_conformance.py"  # which takes long
SEVERAL = "tests/gpu/test_gpu_several_ranks.py"
GRAPHS = "tests/gpu/test_gpu_graphs.py"
ONE_RANK = "tests/gpu/test_gpu_one_rank.py"
TESTS = ("tests/gpu", "tests/kernels/test_block_kernels.py", "tests/kernels/test_gpu_hooks.py",
         "tests/kernels/test_no_waiting.py", f"--ignore={CONFORMANCE}",
         f"--ignore={SEVERAL}", f"--ignore={GRAPHS}")  # fmt: skip
# Tests of kernels for compute-sanitizer: one small test of each kind, because it is slow, and none
# with CUDA graphs, whose memory it cannot tell apart.
FEW = ("same_bytes_for_all and float32", "aligned", "more_tensors", "normal and float32",
       "messages and float32", "drawing", "momentum and float32", "bases and float32",
       "end_of and float32", "compression_sends and float32", "finite and float32-",
       "bfloat16_stochastically")  # fmt: skip
SANITIZED = ("tests/gpu/test_gpu_copies.py", "tests/gpu/test_gpu_sparse_kernels.py",
             "tests/kernels/test_block_kernels.py", "-m", "gpu",
             "-k", " or ".join(FEW))  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A command, the most seconds that it gets, and what it needs, in the form of machine.py.

    ``may_time_out``: a time-out is no failure.
    """

    name: str
    command: Sequence[str]
    limit_seconds: float
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    may_time_out: bool = False


@dataclass(frozen=True)
class StageResult:
    """Outcome of a stage: "passed", "failed", "timed out" or "left out".

    ``last_line``: of its output, without the frame that pytest draws around it, or the reason.
    ``not_done``: tests that had not ended when it was cut off.
    """

    name: str
    status: str
    seconds: float
    last_line: str
    not_done: tuple[str, ...] = ()

    @property
    def is_bad(self) -> bool:
        """Whether the result is a failure."""
        return self.status not in ("passed", "left out")


def stages() -> list[Stage]:
    """Return the stages in order."""
    kernels = ("cupy>=13",)
    # Without pytest-xdist there is not the time for all tests.
    workers = ("-n", str(count_workers())) if not missing(["pytest-xdist>=3"]) else ()
    tests = (*PYTEST, *workers, "-p", "no:benchmark", "-m", "gpu")
    # Ranks that share a device take turns: with more of them, a collective takes far longer.
    taking_turns = (*tests, "-n", "2") if workers else tests
    # The sanitizer of torch sees torch's operations, and no kernel that gets raw pointers.
    watched = {"TORCH_CUDA_SANITIZER": "1"}
    # Each tensor has its own allocation, so that memcheck knows where it ends.
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    sanitizer = (find_sanitizer() or SANITIZER, "--error-exitcode", "9", "--tool")
    return [
        Stage("build", (sys.executable, "setup.py", "build_ext", "--inplace"), 200),
        Stage("kernels", (sys.executable, "-m", "bench.gpu.kernels"), 40, kernels),
        Stage("tests", (*tests, *TESTS), 120, kernels, may_time_out=not workers),
        *(
            Stage(f"{number} ranks", (*taking_turns, SEVERAL, "-k", f"test_{number}_ranks"), 225,
                  kernels, may_time_out=True)
            for number in (2, 4)
        ),
        Stage("graphs", (*taking_turns, GRAPHS), 225, kernels, may_time_out=True),
        Stage("deaths", (sys.executable, "-m", "bench.gpu.deaths", str(DEATHS)), 230, kernels,
              {"PYTHONPATH": "tests"}, may_time_out=True),
        Stage("links", (sys.executable, "-m", "bench.gpu.links", str(LINKS)), 220, kernels,
              may_time_out=True),
        Stage("conformance nccl", (*taking_turns, CONFORMANCE, "-k", "nccl"), 225, kernels,
              may_time_out=True),
        *(
            Stage(
                f"bench {path.stem.removeprefix('test_gpu_')}",
                (*PYTEST, f"bench/gpu/{path.name}", "-W", "default",
                 f"--benchmark-json={WORK / path.stem}.json"),
                45,
                (*kernels, "pytest-benchmark>=4"),
            )
            for path in sorted((ROOT / "bench" / "gpu").glob("test_gpu_*.py"))
        ),
        Stage("conformance", (*tests, CONFORMANCE, "-k", "gloo"), 120, kernels,
              may_time_out=not workers),
        Stage("streams", (*tests, ONE_RANK, "-k", "not example"), 90, kernels, watched,
              may_time_out=not workers),
        *(
            Stage(tool, (*sanitizer, tool, *PYTEST, "-x", *SANITIZED), seconds,
                  (*kernels, SANITIZER), apart, may_time_out=True)
            for tool, seconds in (("memcheck", 90), ("racecheck", 150))
        ),
    ]  # fmt: skip


def run_stage(stage: Stage, limit_seconds: float, log: Path, directory: Path) -> StageResult:
    """Run a stage to its end, or interrupt it at its limit and kill what is left of it.

    Its output is written to ``log``.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # by a shell that runs it in background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    tests = log.with_suffix(".tests")
    for path in (tests, tests.with_name(tests.name + ".done")):
        path.unlink(missing_ok=True)
    text = ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            stage.command,
            cwd=directory,
            env={**os.environ, **ENVIRONMENT, **stage.environment, unfinished.FILE: str(tests)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_seconds)
            status = "passed" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            status, text = "timed out", log.read_text(errors="replace")
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:  # with the processes that the command left behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - start
    text = text or log.read_text(errors="replace")
    last_line = (text.strip().splitlines() or [""])[-1].strip("= ")
    if status == "failed" and REFUSAL in text:
        status = "left out"
        return StageResult(stage.name, status, seconds, last_line)
    not_done = tuple(unfinished.left_in(tests)) if status == "timed out" else ()
    if status == "timed out" and stage.may_time_out:
        status = "left out"
        count = f", {len(not_done)} tests not done" if not_done else ""
        last_line = f"not finished after {seconds:.0f} s{count}: {last_line}".rstrip(": ")
    return StageResult(stage.name, status, seconds, last_line, not_done)


def run_all(planned: Sequence[Stage], seconds: float, logs: Path) -> Iterator[StageResult]:
    """Run the stages while there is time, unless the build fails, and yield their results."""
    end = time.monotonic() + seconds
    is_built = True
    for stage in planned:
        left = end - time.monotonic()
        reason = ", ".join(missing(stage.needs)) if is_built else "nothing was built"
        if not reason and left < LEAST_SECONDS:
            reason = "no time is left"
        if reason:
            yield StageResult(stage.name, "left out", 0.0, reason)
            continue
        limit, log = min(stage.limit_seconds, left), logs / f"{stage.name}.log"
        print(f"{stage.name}: at most {limit:.0f} s", flush=True)
        result = run_stage(stage, limit, log, ROOT)
        print(f"{stage.name}: {result.status} after {result.seconds:.0f} s", flush=True)
        if result.not_done:
            print(f"not done: {', '.join(result.not_done)}", flush=True)
        if result.is_bad:
            print(log.read_text(errors="replace")[-TAIL_CHARACTERS:], flush=True)
            is_built = stage.name != "build"
        yield result


def begin(planned: Sequence[Stage], machine: dict[str, Any], target: Path) -> dict[str, Any]:
    """Return the run that ``target`` has of this device and code, or a new one.

    The planned stages are in it as not begun.
    """
    path = target.with_suffix(".json")
    run = json.loads(path.read_text()) if path.exists() else {}
    same = ("devices", "device_code", "versions")
    if any(run.get("machine", {}).get(key) != machine.get(key) for key in same):
        run = {"date": target.name[:10], "stages": [], "benchmarks": []}
        for former in WORK.glob("test_gpu_*.json"):  # figures of other code
            former.unlink()
    run["machine"] = machine
    for stage in planned:
        put(run["stages"], asdict(StageResult(stage.name, "left out", 0.0, "not begun")))
    path.write_text(json.dumps(run, indent=1) + "\n")
    return run


def put(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Replace the row of the same name and group, or add one."""
    keys = [(each.get("group"), each["name"]) for each in rows]
    key = row.get("group"), row["name"]
    place = keys.index(key) if key in keys else len(rows)
    rows[place : place + 1] = [row]


def save(run: dict[str, Any], result: StageResult, target: Path) -> None:
    """Put a result into the run and write its file, and beside it the log unless it passed."""
    put(run["stages"], asdict(result))
    for path in sorted(WORK.glob("test_gpu_*.json")):
        if path.stat().st_size:  # else the benchmarks have not ended
            for row in json.loads(path.read_text())["benchmarks"]:
                kept = {key: row[key] for key in ("group", "name", "extra_info")}
                put(run["benchmarks"], kept)
    target.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n")
    if result.name == "links" and LINKS.exists():  # which it may have interrupted
        shutil.copy(LINKS, target.with_name(f"{target.name}-shared-links.json"))
    if result.seconds and result.status != "passed":
        log = (WORK / f"{result.name}.log").read_bytes()[-LOG_BYTES:]
        target.with_name(f"{target.name}-{result.name.replace(' ', '-')}.log").write_bytes(log)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--part", action="append", choices=[each.name for each in stages()])
    options = parser.parse_args(arguments)
    if absent := missing(NEEDED):
        print(f"{sys.executable}: {', '.join(absent)}: install them first", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to check; `make cuda` compiles", file=sys.stderr)
        return 2
    planned = [each for each in stages() if not options.part or each.name in options.part]
    date = time.strftime("%Y-%m-%d", time.gmtime())
    device = re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"{date}-{device}"
    if not options.part:  # all anew, the compiled kernels as well
        shutil.rmtree(WORK, ignore_errors=True)
        target.with_suffix(".json").unlink(missing_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    LINKS.unlink(missing_ok=True)
    run = begin(planned, describe(ROOT), target)
    is_bad = False
    for result in run_all(planned, SECONDS, WORK):
        save(run, result, target)
        is_bad |= result.is_bad
    print(f"written: {target}.json; `python -m bench.results_page` and `make results` show it")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
