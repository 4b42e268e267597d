"""Predictions of `commhooks.lab.simulation` beside measurements over shaped links.

::

    python -m bench.predictions measure steps.json rates.json             # measure what is missing
    python -m bench.predictions judge steps.json rates.json result.json   # compare with predictions

`steps.json` has the time of every step; measuring takes about five minutes. `rates.json` has the
measurements that predictions use. `python -m bench.results_page result.json` shows the table.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench import files
from bench.load import busy_seconds, own_seconds
from bench.measured_hooks import backwards, entry_of
from commhooks.cluster import Ranks
from commhooks.cluster.links import burst_bytes, shaped_link
from commhooks.lab.comparison import remote
from commhooks.lab.models import Workload
from commhooks.lab.simulation import (
    BASELINE,
    Job,
    Link,
    Measurements,
    Network,
    Study,
    dry_run_sizes,
    measure,
)

MODEL = "bench.models:ThreeLayers"
BUCKET_MB = 8.0
RANKS = (2, 3, 4)
RATES = (100e6, 1e9, 10e9)
PLAIN = "allreduce"
HOOKS = (PLAIN, "bf16", "int8", "topk:warmup_steps=0", "powersgd:rank=4,start_step=0", "onebit")

_STEPS = range(3, 10)
_BLOCK = 3
_SECONDS = 3.0  # for steps beyond the minimum
_OTHERS = 0.12  # cores; steps in which other processes used more do not count, if others remain


def predict(ranks: int, bits_per_second: float, hook: str, rates: Measurements) -> float:
    """Return the seconds of a backward on this machine, whose cores the ranks share."""
    link = Link(bits_per_second, burst_bytes=burst_bytes(bits_per_second))
    hooks = {BASELINE: rates.of(PLAIN), hook: rates.of(hook)}
    cores = (os.cpu_count() or 1) / ranks
    study = Study(hooks, Network(ranks, link, link), rates.gloo, cores)
    return study.predictions[hook].backward_seconds


def measured_steps(ranks: Ranks, hook: str) -> list[tuple[float, float]]:
    """Time backwards, and the cores that other processes used in the same block of steps."""
    pids = [os.getpid(), *ranks(_pid)]
    timed: list[tuple[float, float]] = []
    end = time.monotonic() + _SECONDS
    while len(timed) < _STEPS.start or (len(timed) < _STEPS.stop and time.monotonic() < end):
        before, start = busy_seconds() - own_seconds(pids), time.monotonic()
        seconds, _ = backwards(ranks, entry_of(hook), len(timed), _BLOCK)
        others = max(0.0, busy_seconds() - own_seconds(pids) - before) / (time.monotonic() - start)
        timed += [(each, others) for each in seconds]
    return timed


def typical(timed: list[tuple[float, float | None]]) -> tuple[float, bool]:
    """Return the median of the undisturbed steps, or of all if there are none."""
    own = [seconds for seconds, others in timed if others is not None and others < _OTHERS]
    return statistics.median(own or [seconds for seconds, _ in timed]), bool(own)


def judge(rows: list[dict[str, Any]], rates: Measurements) -> list[dict[str, Any]]:
    """Return measured and predicted seconds, cell by cell."""
    judged = []
    for row in rows:
        cell = {name: row[name] for name in ("ranks", "bits_per_second", "hook")}
        cell["hook"] = cell["hook"].removeprefix("ours ")
        seconds, is_undisturbed = typical(row["steps"])
        cell |= {"measured_seconds": seconds, "predicted_seconds": predict(**cell, rates=rates)}
        judged.append(cell | {"is_undisturbed": is_undisturbed})
    return judged


def main() -> None:
    """Run the command that the arguments name."""
    command, *paths = sys.argv[1:]
    steps_file, rates_file = Path(paths[0]), Path(paths[1])
    if command == "measure":
        if not rates_file.exists():
            # With as many busy processes as there are cores, as in the measured steps.
            job = Job(MODEL, ranks_per_machine=max(RANKS), bucket_cap_mb=BUCKET_MB)
            measure(job, HOOKS, dry_run_sizes(RANKS, 1)).save(rates_file)
        _measure(steps_file)
        return
    rates = Measurements.load(rates_file)
    judged = judge(files.load(steps_file, []), rates)
    result = {"machine": rates.machine, "model": MODEL, "bucket_mb": BUCKET_MB, "cells": judged}
    files.save(Path(paths[2]), result)


def _measure(path: Path) -> None:
    """Measure what the file lacks, and save it cell by cell."""
    rows = files.load(path, [])
    known = {(row["ranks"], row["bits_per_second"], row["hook"]) for row in rows}
    for size, rate in itertools.product(RANKS, RATES):
        missing = [hook for hook in HOOKS if (size, rate, hook) not in known]
        if not missing:
            continue
        with shaped_link(size, rate) as link, Ranks(size, link) as ranks:
            ranks(remote.prepare, Workload(MODEL, wrapper=(("bucket_cap_mb", BUCKET_MB),)))
            for hook in missing:
                timed = measured_steps(ranks, hook)
                rows.append({"ranks": size, "bits_per_second": rate, "hook": hook, "steps": timed})
                files.save(path, rows)


def _pid(rank: int) -> int:
    return os.getpid()


if __name__ == "__main__":
    main()
