"""Cost of a communicator of NCCL, and the host time of a collective, on one rank."""

import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from bench.test_host_time import measure_host_time

ROUNDS = 3


@pytest.mark.benchmark(group="gpu: connecting a communicator")
@pytest.mark.parametrize("max_ctas", [None, 8, 1])
def test_connecting(benchmark: Any, group: dist.ProcessGroup, max_ctas: int | None) -> None:
    """Measure the time until the first collective has ended, and the memory outside torch's."""
    numbers = torch.ones(1 << 20, device="cuda")
    group.allreduce([numbers]).wait()  # NCCL itself is loaded
    seconds, taken = [], []
    own: list[dist.ProcessGroupNCCL] = []

    def connect() -> None:
        torch.cuda.synchronize()
        before, _ = torch.cuda.mem_get_info()
        start = time.perf_counter()
        options = dist.ProcessGroupNCCL.Options()
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
        own.append(dist.ProcessGroupNCCL(HashStore(), 0, 1, options))
        own[-1].allreduce([numbers]).wait()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        taken.append(before - torch.cuda.mem_get_info()[0])

    benchmark.pedantic(connect, rounds=ROUNDS)
    for communicator in own:
        communicator.abort()
    benchmark.extra_info.update(
        milliseconds=1e3 * statistics.median(seconds), memory_bytes=statistics.median(taken)
    )


@pytest.mark.benchmark(group="gpu: host time of torch's all-reduce of 4 kB")
@pytest.mark.parametrize("is_async", [True, False], ids=["asyncOp", "on the current stream"])
def test_host(benchmark: Any, group: dist.ProcessGroup, is_async: bool) -> None:
    """Measure one call and the wait for it, which orders streams only."""
    numbers = torch.ones(1 << 10, device="cuda")
    options = dist.AllreduceOptions()
    options.asyncOp = is_async

    def reduce() -> None:
        work = group.allreduce([numbers], options)
        if is_async:
            work.wait()

    measure_host_time(benchmark, reduce)
