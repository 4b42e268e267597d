"""Sparse and low-rank hooks on CPU tensors that are treated as tensors on a GPU.

Results are the same as on the CPU, and the host reads nothing from the device.
"""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from emulation import Emulation, emulated
from support.hook_runs import DTYPES, HOOKS, ROUNDED, SYNC_FREE, assert_like_the_cpu, run
from support.no_waiting import HostReads
from torch import Tensor

from commhooks import CommHookError, kernels
from commhooks.algorithms import BatchedPowerSGD, SkipNonfinite, TopK
from commhooks.algorithms.lowrank.kernel_compressor import _has_cupy
from commhooks.algorithms.sparse.selection import select_above
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

# Random-k draws two numbers from the generator, which is on the host.
OWN_READS = {"randomk": 2 * 2, "randomk with errors": 2 * 2}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HOOKS)
def test_kernels_match_the_cpu_and_the_host_reads_nothing(name, dtype):
    reads = OWN_READS.get(name, 0) if name in SYNC_FREE else 10**6
    with emulated():
        found = run(HOOKS[name], dtype, around=lambda: HostReads(reads))
    assert_like_the_cpu(name, dtype, found)


def test_reads_are_detected():
    gradient = torch.randn(9)
    with emulated(), HostReads(0), pytest.raises(AssertionError, match="makes the host wait"):
        select_above(gradient, None, 0.5)


def on_ranks(rank: int, size: int, name: str, is_emulated: bool) -> list[dict[str, Tensor]]:
    """Run on the reducer and the network, with a step that is not finite."""
    parameters = probe_parameters()
    results = []
    with emulated() if is_emulated else nullcontext():
        trainer = Trainer(HOOKS[name](), parameters, stable_buckets=True)
        for step in range(4):
            gradients = draw_gradients(parameters, rank, step)
            if step == 2 and rank == size - 1:
                gradients["odd"][1, 1] = math.nan
            results.append(trainer.step(gradients))
    return results


# One of each family; the others launch the same kernels.
ON_THE_REDUCER = {"topk", "threshold", "randomk", "demo", "dgc", "powersgd"}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, 2, marks=[] if name in ON_THE_REDUCER else [pytest.mark.exhaustive])
        for name in HOOKS
    ]
    + [pytest.param("topk", 3, marks=pytest.mark.exhaustive)],
)
def test_on_the_reducer(run_ranks, name, size):
    of_ranks = run_ranks(on_ranks, size, name, True)
    expected = run_ranks(on_ranks, size, name, False)
    for found, other in zip(of_ranks, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-4, equal_nan=True)
        if not name.startswith(ROUNDED):
            assert same_bits(found, other)


def skip(rank: int, size: int) -> None:
    """Dropped buckets do not change the inner hook's state, and metrics count them."""
    parameters = probe_parameters()
    with emulated():
        inner = TopK(density=0.2, warmup_steps=0)
        hook = SkipNonfinite(inner)
        trainer = Trainer(hook, parameters, stable_buckets=True)
        trainer.step(draw_gradients(parameters, rank, 0))
        before = {name: tensor.clone() for name, tensor in inner.state["odd"].items()}
        for step in (1, 2):
            gradients = draw_gradients(parameters, rank, step)
            if rank == 0:
                gradients["odd"][2, 2] = -math.inf
            found = trainer.step(gradients)
            assert not found["odd"].any()
            assert all(tensor.isfinite().all() for tensor in found.values())
            assert any(tensor.any() for tensor in found.values())
            assert same_bits(inner.state["odd"], before)
            assert hook.last_step_was_skipped
        trainer.step(draw_gradients(parameters, rank, 3))
        assert not hook.last_step_was_skipped
        metrics = trainer.handle.stats().metrics
        assert metrics["skipped_steps"] == metrics["skipped_buckets"] == 2
        assert metrics["last_step_was_skipped"] == 0


def test_steps_are_dropped_without_waiting(run_ranks):
    run_ranks(skip, 2)


class NoCuPy(Emulation):
    """The backend of a device on which no kernel can run."""

    def require(self, device: torch.device) -> None:
        raise CommHookError("no CuPy here")

    def launch(self, *_: object) -> None:
        raise AssertionError("there is no CuPy")


LOW_RANK = {
    "powersgd": HOOKS["powersgd"],
    "batched_powersgd": partial(BatchedPowerSGD, rank=2, start_step=1),
}


@pytest.mark.parametrize("name", LOW_RANK)
def test_low_rank_hooks_do_without_cupy_and_warn_once(name, monkeypatch):
    expected = run(LOW_RANK[name], torch.float32)
    monkeypatch.setitem(kernels.BACKENDS, "cpu", NoCuPy())
    _has_cupy.cache_clear()
    try:
        with pytest.warns(UserWarning, match="through torch, slower: no CuPy") as caught:
            found = run(LOW_RANK[name], torch.float32)
    finally:
        _has_cupy.cache_clear()
    assert len(caught) == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
