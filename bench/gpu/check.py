"""Builds, tests and measures on a CUDA device: ``python -m bench.gpu.check [--output FOLDER]``.

In under nine minutes, without a network, with the Python that runs it and the packages it has. The
stages are independent of each other but for the build; one that hangs is killed at its limit.
Writes FOLDER/<date>-<device>.json and .md; exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.machine import NEEDED, WANTED, describe, missing
from bench.gpu.stages import Outcome, Stage, run_stage

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".",
          "-p", "no:cacheprovider")  # fmt: skip
# Tests of kernels alone, for compute-sanitizer; without graphs, whose memory it cannot tell apart.
KERNEL_TESTS = "tests/gpu/test_gpu_*copies.py", "tests/gpu/test_gpu_*kernels*.py"
BENCH_JSON = "benchmarks.json"


def stages(folder: Path) -> Iterator[Stage]:
    """In order. Their limits add up to 530 seconds."""
    build = (sys.executable, "setup.py", "build_ext", "--inplace")
    yield Stage("build", build, 220)
    yield Stage("tests", (*PYTEST, "tests/gpu", "-m", "gpu"), 130)
    if sanitizer := shutil.which("compute-sanitizer"):
        tests = [str(path) for glob in KERNEL_TESTS for path in sorted(ROOT.glob(glob))]
        for tool in ("memcheck", "racecheck"):
            command = (sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes",
                       "all", *PYTEST, "-x", "-k", "not graph and not float64", *tests)  # fmt: skip
            # Each tensor in an allocation of its own, so that memcheck sees where it ends.
            yield Stage(tool, command, 30, (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),))
    bench = (*PYTEST, "bench/gpu", "-W", "default", f"--benchmark-json={folder / BENCH_JSON}")
    yield Stage("benchmarks", bench, 120)


def run_all(folder: Path) -> list[Outcome]:
    """All of them, unless the build fails."""
    outcomes: list[Outcome] = []
    for stage in stages(folder):
        if outcomes and outcomes[0].is_bad:
            outcomes.append(Outcome(stage.name, "left out", 0.0, "nothing was built"))
            continue
        print(f"{stage.name}: at most {stage.limit_seconds:.0f} s", flush=True)
        outcome = run_stage(stage, folder / f"{stage.name}.log", ROOT)
        print(f"{stage.name}: {outcome.status} after {outcome.seconds:.0f} s", flush=True)
        if outcome.is_bad:
            print(outcome.tail, flush=True)
        outcomes.append(outcome)
    if shutil.which("compute-sanitizer") is None:
        outcomes.append(Outcome("memcheck, racecheck", "left out", 0.0, "no compute-sanitizer"))
    return outcomes


def benchmarks_of(folder: Path) -> list[dict[str, Any]]:
    """What pytest-benchmark wrote, if it came that far."""
    path = folder / BENCH_JSON
    if not path.exists() or not path.stat().st_size:
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["benchmarks"]
    return [{key: row[key] for key in ("group", "name", "extra_info")} for row in rows]


def table(run: dict[str, Any], stem: str) -> str:
    """Markdown: where it took place, how the stages ended, one section for each group."""
    from bench.results_page.gpu_checks import GPU_CHECKS

    return f"# GPU check of {run['date']}\n\n{GPU_CHECKS.render(stem, run).tables}\n"


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
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        outcomes = run_all(Path(name))
        benchmarks = benchmarks_of(Path(name))
    machine = describe(ROOT)
    now = datetime.datetime.now(tz=datetime.UTC)
    run = {
        "date": now.date().isoformat(),
        "machine": machine,
        "stages": [asdict(outcome) for outcome in outcomes],
        "benchmarks": benchmarks,
    }
    device = re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"{run['date']}-{device}"
    target.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n")
    target.with_suffix(".md").write_text(table(run, target.stem))
    print(f"written: {target}.json and .md")
    return int(any(outcome.is_bad for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
