"""Times of kernels and other functions, measured in turn with those they are compared with."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

ROUNDS = 15

_AHEAD_CYCLES = 1_000_000
"""About half a millisecond, in which the host enqueues what is timed."""

Run = Callable[[], Any]


def seconds_of(run: Run, device: str) -> float:
    """Return the time of ``run``; on CUDA that of the device, while the host is ahead of it."""
    if device != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


def in_turn(
    benchmark: Any, timers: Mapping[str, Callable[[], float]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Call functions that return seconds, round by round; pytest-benchmark shows the last one."""
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    *others, subject = timers
    warm_up = max(1, rounds // 5)

    def measure(*names: str) -> None:
        for name in names:
            seconds[name].append(timers[name]())

    benchmark.pedantic(
        lambda: measure(subject),
        setup=lambda: measure(*others),
        rounds=rounds,
        warmup_rounds=warm_up,
        iterations=1,
    )
    return {name: found[warm_up:] or found for name, found in seconds.items()}


def against_copy(
    benchmark: Any,
    run: Run,
    moved_bytes: int,
    like: Tensor,
    *,
    before: Run | None = None,
    aim: str = "",
) -> None:
    """Time ``run`` against a copy of ``like``. ``moved_bytes``: what ``run`` reads and writes.

    ``before`` restores what ``run`` has overwritten, and is not timed.
    """
    target = torch.empty_like(like)
    device = like.device.type

    def timed_run() -> float:
        if before is not None:
            before()
        return seconds_of(run, device)

    copy = partial(seconds_of, lambda: target.copy_(like), device)
    rounds = in_turn(benchmark, {"copy": copy, "run": timed_run})
    seconds = {name: statistics.median(of) for name, of in rounds.items()}
    copied = 2 * like.nbytes
    shares = (copy / own * moved_bytes / copied for copy, own in zip(*rounds.values(), strict=True))
    benchmark.extra_info.update(
        milliseconds=1e3 * seconds["run"],
        moved_bytes=moved_bytes,
        bandwidth=moved_bytes / seconds["run"],
        copy_bandwidth=copied / seconds["copy"],
        share_of_copy=statistics.median(shares),
        aim=aim,
    )


def against_other(benchmark: Any, runs: Mapping[str, Run]) -> None:
    """Time the last of ``runs`` against the others, on CUDA."""
    timers = {name: partial(seconds_of, run, "cuda") for name, run in runs.items()}
    rounds = in_turn(benchmark, timers)
    *others, subject = runs
    benchmark.extra_info.update(
        milliseconds={name: 1e3 * statistics.median(of) for name, of in rounds.items()},
        ratio={
            name: statistics.median(
                one / other for one, other in zip(rounds[subject], rounds[name], strict=True)
            )
            for name in others
        },
    )
