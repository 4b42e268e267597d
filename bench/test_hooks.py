"""Hooks beside torch's: over loopback, over a shaped link, and the cost of awaiting."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from bench.copies import median_of
from bench.measured_hooks import MEASURED_HOOKS, TORCHS_HOOKS, MeasuredHook, entry_of
from bench.models import ThreeLayers, two_layers
from commhooks.cluster import Ranks
from commhooks.comm.stage_groups import StageGroups
from commhooks.lab.comparison.hook_benchmarks import HookBenchmarks
from commhooks.lab.networks import Transformer
from reducer import DistributedDataParallel, GradBucket

STEPS = 24  # two blocks in turn

# Compared with floors and aims over a link, on the large model.
OVER_A_LINK = ("allreduce", "fp16", "bf16", "int8", "int4", "onebit", "topk", "powersgd")
LARGE = [*TORCHS_HOOKS, *(measured for measured in MEASURED_HOOKS if measured.hook in OVER_A_LINK)]
STAGES = 50
_small = torch.zeros(16)
_models: list[nn.Module] = []
_groups: list[dist.ProcessGroup] = []


@dataclass
class ManyStages(commhooks.CommHook):
    """A hook with dependent collectives of 64 bytes."""

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> torch.Tensor:
        """Await STAGES collectives."""
        for _ in range(STAGES):
            await comm.all_reduce(_small)
        return bucket.buffer()


def prepare(rank: int) -> None:
    """Wrap a model with one bucket of one parameter."""
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    commhooks.register(model, ManyStages())
    _models[:] = [model]
    awaited(rank)  # connects the stage groups


def awaited(rank: int) -> float:
    """Time a backward whose only bucket awaits all stages."""
    loss = _models[0](torch.ones(1, 4)).sum()
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def bare(rank: int, groups: int) -> float:
    """Time the same collectives one after the other, in turn on ``groups`` stage groups.

    Each stage of a hook has its own group, and a group that was idle answers later than one that
    was just used.
    """
    while len(_groups) < groups:
        _groups.append(_maker().open(len(_groups)))
    dist.barrier()
    start = time.perf_counter()
    for stage in range(STAGES):
        _groups[stage % groups].allreduce([_small]).wait()
    return time.perf_counter() - start


@functools.cache
def _maker() -> StageGroups:
    assert dist.group.WORLD is not None
    return StageGroups(dist.group.WORLD, token=0)


def name_of(value: object) -> str | None:
    return value.name if isinstance(value, MeasuredHook) else None


def verified(
    benchmark: Any, hook_benchmark: HookBenchmarks, hook: MeasuredHook, **place: Any
) -> None:
    """Benchmark a hook whose first error is within its limit."""
    error = hook_benchmark(hook.entry, steps=STEPS, **place).error
    assert error is not None
    if hook.largest_error is not None:
        assert error <= hook.largest_error
    else:
        assert error == pytest.approx(benchmark.extra_info["noop_error"], rel=1e-5)


@pytest.mark.parametrize("measured", LARGE, ids=name_of)
@pytest.mark.parametrize("link", ["loopback", "1gbit"])
def test_large_model(
    benchmark: Any, hook_benchmark: HookBenchmarks, measured: MeasuredHook, link: str
) -> None:
    """Measure 151 MB over loopback, which is as fast as memory, and over a link."""
    verified(benchmark, hook_benchmark, measured, model=Transformer, link=link)


@pytest.mark.parametrize("measured", [*TORCHS_HOOKS, *MEASURED_HOOKS], ids=name_of)
@pytest.mark.parametrize(("world_size", "bucket_mb"), [(2, 1), (2, 25), (4, 25)], ids=str)
def test_every_hook(
    benchmark: Any,
    hook_benchmark: HookBenchmarks,
    measured: MeasuredHook,
    world_size: int,
    bucket_mb: int,
) -> None:
    """Measure 25 MB over loopback."""
    place = {"world_size": world_size, "wrapper": {"bucket_cap_mb": bucket_mb}}
    verified(benchmark, hook_benchmark, measured, model=two_layers, **place)


def small_batch() -> torch.Tensor:
    """Return few inputs: four ranks on a small machine would otherwise measure its cores."""
    return ThreeLayers.example_input()[:8]


@pytest.mark.parametrize("form", ["{0}", "{1}", "{1},sharded=false"])
@pytest.mark.parametrize("inner", ["allreduce", "int8", "int4", "powersgd:rank=4,start_step=0"])
def test_two_hosts(hook_benchmark: HookBenchmarks, inner: str, form: str) -> None:
    """Measure hooks and both forms of ``hierarchical`` around them on 2 hosts of 2 ranks.

    ``hierarchical``: at most 0.72 of plain averaging, around ``int8`` at most 0.85 of ``int8``.
    """
    hook = entry_of(form.format(inner, f"hierarchical:inner=({inner}),ranks_per_node=2"))
    place: dict[str, Any] = {"world_size": 4, "link": "1gbit", "ranks_per_host": 2, "steps": 12}
    wrapper = {"bucket_cap_mb": 8}
    hook_benchmark(hook, model=ThreeLayers, batch=small_batch, wrapper=wrapper, **place)


@pytest.mark.parametrize("name", ["torch powersgd", "powersgd:rank=4,start_step=0"])
def test_powersgd_in_one_bucket(hook_benchmark: HookBenchmarks, name: str) -> None:
    """Measure PowerSGD in one bucket: torch's hangs or aborts on several over Gloo."""
    wrapper = {"bucket_cap_mb": 1000}
    hook_benchmark(entry_of(name), model=two_layers, steps=STEPS, wrapper=wrapper)


@pytest.mark.benchmark(group="hooks: awaiting")
def test_awaited_stage(benchmark: Any) -> None:
    """Measure what Python adds to each awaited collective; the aim is at most 50 microseconds."""
    seconds: dict[str, list[float]] = {"bare": [], "bare, one group": [], "awaited": []}

    with Ranks(2) as ranks:
        ranks(prepare)

        def run() -> None:
            seconds["bare"].append(max(ranks(bare, STAGES)))
            seconds["bare, one group"].append(max(ranks(bare, 1)))
            seconds["awaited"].append(max(ranks(awaited)))

        benchmark.pedantic(run, rounds=30, warmup_rounds=5, iterations=1)
    per_stage = {name: median_of(values, warm_up=5) / STAGES for name, values in seconds.items()}
    benchmark.extra_info.update(
        stages=STAGES,
        seconds=per_stage,
        added_seconds=per_stage["awaited"] - per_stage["bare"],
        aim=50e-6,
    )
