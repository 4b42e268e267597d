"""Whole steps, ours against torch's wrapper on one rank with NCCL, and the host time of hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from bench.copies import against_copy, against_other
from bench.models import parameter_shapes
from bench.test_host_time import SUBJECTS, measure, runner_and_bucket
from commhooks.lab.networks import GPT2Small
from reducer import DistributedDataParallel


class GivenGradients(nn.Module):
    """A model in the shapes of GPT-2 small whose backward only writes gradients."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = parameter_shapes(GPT2Small)
        self.parts = nn.ParameterList(torch.zeros(shape, device="cuda") for shape in shapes)
        self.gradients = [
            torch.randn(shape, device="cuda", generator=generator) for shape in shapes
        ]

    def forward(self) -> Tensor:
        """A scalar whose gradients are given."""
        return Given.apply(self.gradients, *self.parts)


class Given(torch.autograd.Function):
    """Return zero."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parts: Tensor) -> Tensor:
        """Apply the function to all parameters."""
        ctx.gradients = gradients
        return parts[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return copies of the gradients, written as by a matrix product."""
        return None, *(given.clone() for given in ctx.gradients)


def backward_of(model: nn.Module) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model().backward()

    return run


@pytest.mark.benchmark(group="gpu: PowerSGD rank 4, GPT-2 small")
@pytest.mark.usefixtures("group")
def test_powersgd(benchmark: Any) -> None:
    """Measure what the hook adds to a backward that only writes gradients, for ours and torch's."""
    bare = GivenGradients()
    theirs = TorchDDP(GivenGradients(), bucket_cap_mb=25)
    state = torch_powersgd.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2
    )
    theirs.register_comm_hook(state, torch_powersgd.powerSGD_hook)
    ours = DistributedDataParallel(GivenGradients(), bucket_cap_mb=25)
    commhooks.register(ours, "powersgd", rank=4, start_step=2)
    runs = {name: backward_of(m) for name, m in [("bare", bare), ("torch", theirs), ("ours", ours)]}
    for _ in range(5):
        for run in runs.values():
            run()
    for model in (theirs, ours):
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        assert torch.stack(norms).isfinite().all()
    against_other(benchmark, runs)
    added = dict(benchmark.extra_info["milliseconds"])
    benchmark.extra_info["added_to_torch_added"] = (added["ours"] - added["bare"]) / (
        added["torch"] - added["bare"]
    )


@pytest.mark.benchmark(group="gpu: top-k 1 % of 256 MB")
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "with feedback"])
def test_topk(benchmark: Any, group: dist.ProcessGroup, feedback: bool) -> None:
    """Run the whole hook, which also replaces the gradients and keeps the residual."""
    buffer = torch.randn(1 << 26, device="cuda")
    hook = commhooks.create("topk", density=0.01, warmup_steps=0, error_feedback=feedback)
    runner, bucket = runner_and_bucket(hook, [(buffer.numel(),)], buffer, group)
    values = buffer.clone()

    def run() -> None:
        runner(bucket).wait()

    run()
    assert buffer.count_nonzero() <= 0.0101 * buffer.numel()
    buffer.copy_(values)
    # Gradients are read and replaced; with feedback they are also written once, and errors are
    # read and replaced from them.
    passes = 6 if feedback else 2
    against_copy(benchmark, run, passes * buffer.nbytes, values)


@pytest.mark.benchmark(group="gpu: training step, GPT-2 small, bf16")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
def test_training_step(benchmark: Any, view: bool) -> None:
    """Time forward, backward and AdamW with a batch of 8 × 1024 tokens."""
    tokens, targets = (part.repeat(8, 8).cuda() for part in GPT2Small.example_input())
    runs: dict[str, Callable[[], None]] = {}
    losses: dict[str, list[Tensor]] = {}
    for name, wrapper in [("torch", TorchDDP), ("ours", DistributedDataParallel)]:
        torch.manual_seed(0)
        module = GPT2Small().cuda().to(torch.bfloat16)
        model: nn.Module = wrapper(module, gradient_as_bucket_view=view)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        losses[name] = []
        runs[name] = training_step(model, optimizer, (tokens, targets), losses[name])
    for run in runs.values():
        for _ in range(5):
            run()
    torch.testing.assert_close(losses["ours"], losses["torch"])
    against_other(benchmark, runs)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    losses: list[Tensor],
) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    return run


@pytest.mark.benchmark(group="gpu: host time of Python, per bucket and hook")
@pytest.mark.parametrize("name", SUBJECTS)
def test_host_time(benchmark: Any, group: dist.ProcessGroup, name: str) -> None:
    """Measure the host time from passing a bucket until its future is returned."""
    measure(benchmark, name, "cuda", group, settle=torch.cuda.synchronize)
