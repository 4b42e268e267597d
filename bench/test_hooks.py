"""Hooks beside torch's: over loopback, over a shaped link, and the cost of awaiting."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from bench.measured_hooks import MEASURED_HOOKS, entry_of, name_of
from bench.models import ThreeLayers, two_layers
from commhooks.comm.stage_groups import StageGroups
from commhooks.lab.comparison.hook_benchmarks import HookBenchmarks
from commhooks.lab.comparison.rank_side import FirstSteps
from commhooks.lab.networks import Transformer
from reducer import GradBucket

STEPS = 24  # two blocks in turn

# Compared with floors and aims over a link, on the large model.
OVER_A_LINK = ("allreduce", "fp16", "bf16", "int8", "int4", "onebit", "topk", "powersgd")
LARGE = [hook for hook in MEASURED_HOOKS if name_of(hook) in ("torch fp16", *OVER_A_LINK)]
STAGES = 50
POWERSGD = "powersgd:rank=4,start_step=0"


def check_error(first: FirstSteps, hook: str, noop_error: float) -> None:
    """Check that a first error is below the limit of ``hook``, and that it has averaged."""
    limit = MEASURED_HOOKS[hook]
    assert first.error is not None
    assert limit is not None
    assert first.error < limit
    assert first.error != pytest.approx(noop_error, rel=1e-5)
    assert first.error != pytest.approx(1.0, rel=1e-5)  # that of zeros


def verified(benchmark: Any, hook_benchmark: HookBenchmarks, hook: str, **place: Any) -> None:
    """Benchmark a hook whose first error is within its limit."""
    first = hook_benchmark(entry_of(hook), steps=STEPS, **place)
    noop_error = benchmark.extra_info["noop_error"]
    if MEASURED_HOOKS[hook] is not None:
        check_error(first, hook, noop_error)
    else:
        assert first.error == pytest.approx(noop_error, rel=1e-5)


@pytest.mark.parametrize("hook", LARGE)
@pytest.mark.parametrize("link", ["loopback", "1gbit"])
def test_large_model(benchmark: Any, hook_benchmark: HookBenchmarks, hook: str, link: str) -> None:
    """Measure 151 MB over loopback, which is as fast as memory, and over a link."""
    verified(benchmark, hook_benchmark, hook, model=Transformer, link=link)


@pytest.mark.parametrize("hook", MEASURED_HOOKS)
@pytest.mark.parametrize(("world_size", "bucket_mb"), [(2, 1), (2, 25), (4, 25)], ids=str)
def test_every_hook(
    benchmark: Any, hook_benchmark: HookBenchmarks, hook: str, world_size: int, bucket_mb: int
) -> None:
    """Measure 25 MB over loopback."""
    place = {"world_size": world_size, "wrapper": {"bucket_cap_mb": bucket_mb}}
    verified(benchmark, hook_benchmark, hook, model=two_layers, **place)


def small_batch() -> Tensor:
    """Return few inputs: four ranks on a small machine would otherwise measure its cores."""
    return ThreeLayers.example_input()[:8]


@pytest.mark.parametrize("form", ["{0}", "{1}", "{1},sharded=false"])
@pytest.mark.parametrize("inner", ["allreduce", "int8", "int4", POWERSGD])
def test_two_hosts(benchmark: Any, hook_benchmark: HookBenchmarks, inner: str, form: str) -> None:
    """Measure hooks and both forms of ``hierarchical`` around them on 2 hosts of 2 ranks.

    ``hierarchical``: at most 0.72 of plain averaging, around ``int8`` at most 0.85 of ``int8``.
    """
    hook = entry_of(form.format(inner, f"hierarchical:inner=({inner}),ranks_per_node=2"))
    place: dict[str, Any] = {"world_size": 4, "link": "1gbit", "ranks_per_host": 2, "steps": 12}
    wrapper = {"bucket_cap_mb": 8}
    first = hook_benchmark(hook, model=ThreeLayers, batch=small_batch, wrapper=wrapper, **place)
    check_error(first, inner, benchmark.extra_info["noop_error"])


@pytest.mark.parametrize("name", ["torch powersgd", POWERSGD])
def test_powersgd_in_one_bucket(benchmark: Any, hook_benchmark: HookBenchmarks, name: str) -> None:
    """Measure PowerSGD in one bucket: torch's hangs or aborts on several over Gloo.

    Torch's averages exactly in the first steps, of which only its exactness can be verified.
    """
    wrapper = {"bucket_cap_mb": 1000}
    first = hook_benchmark(entry_of(name), model=two_layers, steps=STEPS, wrapper=wrapper)
    check_error(
        first, POWERSGD if name == POWERSGD else "allreduce", benchmark.extra_info["noop_error"]
    )


@dataclass
class Stages(commhooks.CommHook):
    """Dependent collectives of 64 bytes: awaited, or one after the other in as many groups.

    A group that was idle answers later than one that was just used.
    """

    awaits: bool = True

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        small = torch.zeros(16)
        for stage in range(STAGES):
            if self.awaits:
                await comm.all_reduce(small)
            else:
                stage_groups().open(stage).allreduce([small]).wait()
        return bucket.buffer()


@functools.cache
def stage_groups() -> StageGroups:
    world = dist.group.WORLD
    assert world is not None
    return StageGroups(world, token=0)


def one_number() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


def example() -> Tensor:
    return torch.ones(1, 1)


@pytest.mark.parametrize("awaits", [True, False], ids=["awaiting", "waiting"])
def test_awaited_stages(hook_benchmark: HookBenchmarks, awaits: bool) -> None:
    """Measure what Python adds to 50 awaited collectives; the aim is at most 2.5 ms."""
    hook_benchmark(Stages, model=one_number, batch=example, steps=STEPS, awaits=awaits)
