"""Build, test and measure on a CUDA device: ``python -m bench.gpu.check [--output FOLDER]``.

Takes under nine minutes, without a network, with the Python that runs it and the packages it has.
Apart from the build, the stages do not depend on each other; a stage that hangs is killed at its
limit. After every stage FOLDER/<date>-<device>.json is written again, so that an early end leaves
the results so far. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.machine import NEEDED, WANTED, describe, find_sanitizer, missing
from bench.gpu.stages import Stage, StageResult, run_stage

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".",
          "--confcutdir", ".", "-p", "no:cacheprovider")  # fmt: skip
CONFORMANCE = "tests/gpu/test_gpu_conformance.py"  # which takes long
TESTS = ("tests/gpu", "tests/kernels/test_block_kernels.py", "tests/kernels/test_gpu_hooks.py",
         f"--ignore={CONFORMANCE}")  # fmt: skip
# Tests of kernels for compute-sanitizer: one small test of each kind, because it is slow, and none
# with CUDA graphs, whose memory it cannot tell apart.
FEW = ("same_bytes_for_all and float32", "aligned", "more_tensors", "normal and float32",
       "messages and float32", "drawn", "momentum and float32", "bases and float32",
       "end_of and float32", "compression_sends and float32", "finite and float32-")  # fmt: skip
SANITIZED = ("tests/gpu/test_gpu_copies.py", "tests/gpu/test_gpu_sparse_kernels.py",
             "tests/kernels/test_block_kernels.py", "-m", "gpu",
             "-k", " or ".join(FEW))  # fmt: skip


def stages(folder: Path) -> Iterator[Stage]:
    """Yield the stages in order. Their limits add up to 520 seconds."""
    # The first stage that uses a kernel compiles it for all. All ranks are on this machine, whose
    # host name need not resolve.
    own = (("CUPY_CACHE_DIR", str(folder / "kernels")), ("GLOO_SOCKET_IFNAME", "lo"),
           ("NCCL_SOCKET_IFNAME", "lo"))  # fmt: skip
    yield Stage("build", (sys.executable, "setup.py", "build_ext", "--inplace"), 130)
    yield Stage("tests", (*PYTEST, "-m", "gpu", *TESTS), 120, own)
    if sanitizer := find_sanitizer():
        # Each tensor has its own allocation, so that memcheck knows where it ends.
        apart = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        for tool in ("memcheck", "racecheck"):
            command = (sanitizer, "--tool", tool, "--error-exitcode", "9", *PYTEST, "-x")
            yield Stage(tool, (*command, *SANITIZED), 45, (*own, apart))
    for path in _benches():
        name = path.stem.removeprefix("test_gpu_")
        report = f"--benchmark-json={folder / path.stem}.json"
        bench = (*PYTEST, f"bench/gpu/{path.name}", "-W", "default", report)
        yield Stage(f"bench {name}", bench, 40, own)
    yield Stage("conformance", (*PYTEST, "-m", "gpu", CONFORMANCE), 60, own)


def _benches() -> list[Path]:
    found = sorted((ROOT / "bench" / "gpu").glob("test_gpu_*.py"))
    return [] if missing({"pytest_benchmark": ""}) else found


def run_all(planned: Sequence[Stage], folder: Path) -> Iterator[list[StageResult]]:
    """Run all stages, unless the build fails; yield the results so far after each.

    A stage may also use the time that earlier stages did not need.
    """
    results: list[StageResult] = []
    end = time.monotonic() + sum(stage.limit_seconds for stage in planned)
    for number, stage in enumerate(planned, 1):
        if results and results[0].is_bad:
            results.append(StageResult(stage.name, "left out", 0.0, "nothing was built"))
            continue
        kept = sum(later.limit_seconds for later in planned[number:])
        limit = max(stage.limit_seconds, end - time.monotonic() - kept)
        print(f"{stage.name}: at most {limit:.0f} s", flush=True)
        result = run_stage(stage, limit, folder / f"{stage.name}.log", ROOT)
        print(f"{stage.name}: {result.status} after {result.seconds:.0f} s", flush=True)
        if result.is_bad:
            print(result.tail, flush=True)
        results.append(result)
        yield results
    if find_sanitizer() is None:
        results.append(StageResult("memcheck, racecheck", "left out", 0.0, "no compute-sanitizer"))
    if not _benches():
        results.append(StageResult("benches", "left out", 0.0, "no pytest-benchmark"))
    yield results


def benchmarks_of(folder: Path) -> list[dict[str, Any]]:
    """Return what pytest-benchmark wrote, if anything."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("test_gpu_*.json")):
        if path.stat().st_size:
            rows += json.loads(path.read_text())["benchmarks"]
    return [{key: row[key] for key in ("group", "name", "extra_info")} for row in rows]


def main() -> int:
    """Run everything, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results")
    output: Path = parser.parse_args().output
    if absent := missing(NEEDED):
        print(f"{sys.executable} lacks {', '.join(absent)}: install them first", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to check; `make cuda` compiles", file=sys.stderr)
        return 2
    for name in missing(WANTED):
        print(f"note: there is no {name}", flush=True)
    run: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": describe(ROOT),
    }
    device = re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"{run['date']}-{device}"
    results: list[StageResult] = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        for results in run_all(list(stages(folder)), folder):
            run["stages"] = [asdict(result) for result in results]
            run["benchmarks"] = benchmarks_of(folder)
            target.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n")
    print(f"written: {target}.json; `make results` shows it")
    return int(any(result.is_bad for result in results))


if __name__ == "__main__":
    sys.exit(main())
