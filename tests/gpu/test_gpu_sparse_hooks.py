"""Sparse and low-rank hooks on a GPU: the same results as on the CPU, without waiting."""

import math
from contextlib import nullcontext

import pytest
import torch
from support.hook_runs import DTYPES, HOOKS, SYNC_FREE, assert_like_the_cpu, run
from support.lockstep import lockstep, make_bucket
from support.no_waiting import waiting_is_an_error

from commhooks.algorithms import RandomK, SkipNonfinite, TopK
from commhooks.testing.compare import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HOOKS)
def test_like_the_cpu(name, dtype):
    around = waiting_is_an_error if name in SYNC_FREE else nullcontext
    assert_like_the_cpu(name, dtype, run(HOOKS[name], dtype, device="cuda", around=around))


@pytest.mark.parametrize("density", [0.001, 0.01, 0.5])
def test_large_bucket_is_like_on_the_cpu(density):
    """The bucket has enough chunks, words and segments for all blocks of a GPU."""
    gradient = torch.randn(10_000_019, generator=torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", "cuda"):
        hooks = [TopK(density=density, warmup_steps=0) for _ in range(2)]
        for step in range(2):
            buckets = [make_bucket({"p": part.to(device)}, step) for part in gradient[1:].chunk(2)]
            found, _ = lockstep(hooks, buckets)
        results.append([result.cpu() for result in found])
        results[-1] += [hook.state["p"]["error"].cpu() for hook in hooks]
    assert same_bits(*results)


def test_steps_are_dropped_without_waiting_for_the_device():
    hook = SkipNonfinite(RandomK(density=0.5))
    for number in (1.0, math.inf):
        bucket = make_bucket({"p": torch.full((5000,), number, device="cuda")})
        with waiting_is_an_error():  # one rank is enough for that
            (result,), _ = lockstep([hook], [bucket])
        assert result.any() == (number == 1.0)
    assert hook.last_step_was_skipped
