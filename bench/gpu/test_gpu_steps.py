"""Whole steps, ours against torch's wrapper on one rank with NCCL."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from bench.copies import against_copy, against_other
from bench.models import parameter_shapes
from bench.test_host_time import runner_and_bucket
from commhooks.lab.networks import GPT2Small
from commhooks.runtime import stream_runner
from reducer import DistributedDataParallel


class Parameters(nn.Module):
    """The parameters of GPT-2 small, where a backward begins that only writes given gradients."""

    def __init__(self) -> None:
        super().__init__()
        shapes = parameter_shapes(GPT2Small)
        self.parts = nn.ParameterList(torch.zeros(shape, device="cuda") for shape in shapes)

    def forward(self) -> list[Tensor]:
        """Return the parameters."""
        return list(self.parts)


def run_backward(model: nn.Module, gradients: list[Tensor]) -> None:
    """Clear the gradients, and let a backward copy others to them."""
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(model(), gradients)


@pytest.mark.benchmark(group="gpu: PowerSGD rank 4, GPT-2 small")
@pytest.mark.usefixtures("group")
def test_powersgd(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure what the hook adds to a backward that only writes gradients, for ours and torch's."""
    monkeypatch.setattr(stream_runner, "SENDS_ALONE", True)  # as torch's hook does
    theirs = TorchDDP(Parameters(), bucket_cap_mb=25)
    state = torch_powersgd.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2
    )
    theirs.register_comm_hook(state, torch_powersgd.powerSGD_hook)
    ours = DistributedDataParallel(Parameters(), bucket_cap_mb=25)
    commhooks.register(ours, "powersgd", rank=4, start_step=2)
    models = {"bare": Parameters(), "torch": theirs, "ours": ours}
    gradients = [torch.randn_like(part) for part in ours.parameters()]
    runs = {name: partial(run_backward, model, gradients) for name, model in models.items()}
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
def test_topk(
    benchmark: Any, group: dist.ProcessGroup, feedback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the whole hook, which also replaces the gradients and keeps the residual."""
    monkeypatch.setattr(stream_runner, "SENDS_ALONE", True)
    buffer = torch.randn(1 << 26, device="cuda")
    hook = commhooks.create("topk", density=0.01, warmup_steps=0, error_feedback=feedback)
    runner, bucket = runner_and_bucket(hook, [(buffer.numel(),)], buffer, group)
    values = buffer.clone()

    def run() -> None:
        runner(bucket).wait()

    run()
    assert buffer.count_nonzero() <= 0.0101 * buffer.numel()
    # Gradients are read and replaced; with feedback they are also written once, and errors are
    # read and replaced from them.
    passes = 6 if feedback else 2
    restore = partial(buffer.copy_, values)
    against_copy(benchmark, run, passes * buffer.nbytes, values, before=restore)


@pytest.mark.benchmark(group="gpu: training step, GPT-2 small, bf16")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
def test_training_step(benchmark: Any, view: bool) -> None:
    """Time forward, backward and AdamW with a batch of 8 × 1024 tokens.

    Both call the same function for each bucket: our own average sends nothing on one rank.
    """
    tokens, targets = (part.repeat(8, 8).cuda() for part in GPT2Small.example_input())
    runs = {}
    for name, wrapper in [("torch", TorchDDP), ("ours", DistributedDataParallel)]:
        torch.manual_seed(0)
        module = GPT2Small().cuda().to(torch.bfloat16)
        model = wrapper(module, gradient_as_bucket_view=view)
        model.register_comm_hook(None, allreduce_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        runs[name] = partial(run_step, model, optimizer, tokens, targets)
    losses = {name: [run() for _ in range(5)] for name, run in runs.items()}
    torch.testing.assert_close(losses["ours"], losses["torch"])
    against_other(benchmark, runs)


def run_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Train on a batch; return the loss."""
    optimizer.zero_grad(set_to_none=True)
    loss: Tensor = model(tokens, targets)
    loss.backward()
    optimizer.step()
    return loss.detach()
