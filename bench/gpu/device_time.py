"""Device times of a function, measured in turn with a plain copy of memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROUNDS = 15
WARM_UP = 3

Run = Callable[[], Any]


def seconds_of(run: Run) -> float:
    """Return the device time from the first kernel of ``run`` to the end of its last."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


def in_turn(benchmark: Any, runs: dict[str, Run]) -> dict[str, list[float]]:
    """Time each function, round by round; pytest-benchmark shows the last one."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    *others, subject = runs

    def run_others() -> None:
        for name in others:
            seconds[name].append(seconds_of(runs[name]))

    benchmark.pedantic(
        lambda: seconds[subject].append(seconds_of(runs[subject])),
        setup=run_others,
        rounds=ROUNDS,
        warmup_rounds=WARM_UP,
        iterations=1,
    )
    return {name: rounds[WARM_UP:] for name, rounds in seconds.items()}


def against_copy(benchmark: Any, run: Run, moved_bytes: int, like: Tensor, aim: str) -> None:
    """Time ``run`` against a copy of ``like``. ``moved_bytes``: what ``run`` reads and writes."""
    target = torch.empty_like(like)
    rounds = in_turn(benchmark, {"copy": lambda: target.copy_(like), "run": run})
    copied = 2 * like.nbytes
    shares = [
        (moved_bytes / run_seconds) / (copied / copy_seconds)
        for copy_seconds, run_seconds in zip(rounds["copy"], rounds["run"], strict=True)
    ]
    seconds = statistics.median(rounds["run"])
    benchmark.extra_info.update(
        milliseconds=1e3 * seconds,
        moved_bytes=moved_bytes,
        bandwidth=moved_bytes / seconds,
        copy_bandwidth=copied / statistics.median(rounds["copy"]),
        share_of_copy=statistics.median(shares),
        aim=aim,
    )


def against_other(benchmark: Any, runs: dict[str, Run], aim: str) -> None:
    """Time the last of ``runs`` against the others."""
    rounds = in_turn(benchmark, runs)
    *others, subject = runs
    benchmark.extra_info.update(
        milliseconds={name: 1e3 * statistics.median(of) for name, of in rounds.items()},
        ratio={
            name: statistics.median(
                one / other for one, other in zip(rounds[subject], rounds[name], strict=True)
            )
            for name in others
        },
        aim=aim,
    )
