"""Build, test and measure on a CUDA device: ``python -m bench.gpu.check [--output FOLDER]``.

Takes under nine minutes, without a network, with the Python that runs it and the packages it has.
Apart from the build, stages do not depend on each other; a stage that hangs is killed at its limit.
After every stage FOLDER/<date>-<device>.json is written again, so that an early end leaves the
results so far, and a stage that fails leaves its log there. Exits with 1 if anything failed. What
the machine does not have is left out.
"""

import argparse
import datetime
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.machine import (
    NEEDED,
    SANITIZER,
    count_workers,
    describe,
    find_sanitizer,
    missing,
)
from bench.gpu.stages import Stage, StageResult, run_stage

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu-check"
SECONDS = 520.0
"""The time of the whole check."""
LEAST_SECONDS = 20.0
"""With less time left, no stage is begun."""
LOG_BYTES = 200_000

PYTEST = (sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".",
          "--confcutdir", ".", "-p", "no:cacheprovider")  # fmt: skip
CONFORMANCE = "tests/gpu/test_gpu_conformance.py"  # which takes long
ONE_RANK = "tests/gpu/test_gpu_one_rank.py"
TESTS = ("tests/gpu", "tests/kernels/test_block_kernels.py", "tests/kernels/test_gpu_hooks.py",
         "tests/kernels/test_no_waiting.py", f"--ignore={CONFORMANCE}")  # fmt: skip
# Tests of kernels for compute-sanitizer: one small test of each kind, because it is slow, and none
# with CUDA graphs, whose memory it cannot tell apart.
FEW = ("same_bytes_for_all and float32", "aligned", "more_tensors", "normal and float32",
       "messages and float32", "drawn", "momentum and float32", "bases and float32",
       "end_of and float32", "compression_sends and float32", "finite and float32-")  # fmt: skip
SANITIZED = ("tests/gpu/test_gpu_copies.py", "tests/gpu/test_gpu_sparse_kernels.py",
             "tests/kernels/test_block_kernels.py", "-m", "gpu",
             "-k", " or ".join(FEW))  # fmt: skip


def stages() -> list[Stage]:
    """Return the stages in order."""
    # The build folder has the kernels. All ranks are on this machine, whose host name need not
    # resolve.
    own = (("CUPY_CACHE_DIR", str(WORK / "kernels")), ("GLOO_SOCKET_IFNAME", "lo"),
           ("NCCL_SOCKET_IFNAME", "lo"))  # fmt: skip
    kernels = ("cupy>=13",)
    # Without pytest-xdist there is not the time for all tests.
    workers = ("-n", str(count_workers())) if not missing(["pytest-xdist>=3"]) else ()
    tests = (*PYTEST, *workers, "-p", "no:benchmark", "-m", "gpu")
    # The sanitizer of torch sees torch's operations, and no kernel that gets raw pointers.
    watched = (*own, ("TORCH_CUDA_SANITIZER", "1"))
    # Each tensor has its own allocation, so that memcheck knows where it ends.
    apart = (*own, ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"))
    sanitizer = (find_sanitizer() or SANITIZER, "--error-exitcode", "9", "--tool")
    return [
        Stage("build", (sys.executable, "setup.py", "build_ext", "--inplace"), 200),
        Stage("kernels", (sys.executable, "-m", "bench.gpu.kernels"), 40, own, kernels),
        *(
            Stage(
                f"bench {path.stem.removeprefix('test_gpu_')}",
                (*PYTEST, f"bench/gpu/{path.name}", "-W", "default",
                 f"--benchmark-json={WORK / path.stem}.json"),
                45,
                own,
                (*kernels, "pytest-benchmark>=4"),
            )
            for path in sorted((ROOT / "bench" / "gpu").glob("test_gpu_*.py"))
        ),
        Stage("tests", (*tests, *TESTS), 120, own, kernels, may_time_out=not workers),
        Stage("conformance", (*tests, CONFORMANCE), 120, own, kernels, may_time_out=not workers),
        Stage("streams", (*tests, ONE_RANK), 90, watched, kernels, may_time_out=not workers),
        *(
            Stage(tool, (*sanitizer, tool, *PYTEST, "-x", *SANITIZED), seconds, apart,
                  (*kernels, SANITIZER), may_time_out=True)
            for tool, seconds in (("memcheck", 90), ("racecheck", 150))
        ),
    ]  # fmt: skip


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
        limit = min(stage.limit_seconds, left)
        print(f"{stage.name}: at most {limit:.0f} s", flush=True)
        result = run_stage(stage, limit, logs / f"{stage.name}.log", ROOT)
        print(f"{stage.name}: {result.status} after {result.seconds:.0f} s", flush=True)
        if result.is_bad:
            print(result.tail, flush=True)
            is_built = stage.name != "build"
        yield result


def benchmarks_of(folder: Path) -> list[dict[str, Any]]:
    """Return what pytest-benchmark wrote, if anything."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("test_gpu_*.json")):
        if path.stat().st_size:
            rows += json.loads(path.read_text())["benchmarks"]
    return [{key: row[key] for key in ("group", "name", "extra_info")} for row in rows]


def save(run: dict[str, Any], result: StageResult, target: Path) -> None:
    """Add a result to the run and write its file, and the log of a failure beside it."""
    columns = ("name", "status", "seconds", "last_line")
    run["stages"].append({column: getattr(result, column) for column in columns})
    run["benchmarks"] = benchmarks_of(WORK)
    target.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n")
    if result.is_bad:
        log = (WORK / f"{result.name}.log").read_bytes()[-LOG_BYTES:]
        target.with_name(f"{target.name}-{result.name.replace(' ', '-')}.log").write_bytes(log)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    if absent := missing(NEEDED):
        print(f"{sys.executable}: {', '.join(absent)}: install them first", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to check; `make cuda` compiles", file=sys.stderr)
        return 2
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    run: dict[str, Any] = {"date": date, "machine": describe(ROOT), "stages": []}
    device = re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"{date}-{device}"
    is_bad = False
    for result in run_all(stages(), SECONDS, WORK):
        save(run, result, target)
        is_bad |= result.is_bad
    print(f"written: {target}.json; `python -m bench.results_page` and `make results` show it")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
