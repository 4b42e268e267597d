"""Torch-style functions: averages in another dtype than the gradients, and annotations."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import same_on_all_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks

WRAPPERS = {
    torch.float16: default_hooks.fp16_compress_wrapper,
    torch.bfloat16: default_hooks.bf16_compress_wrapper,
}


def state_and_hook(name: str, net: nn.Module) -> tuple[Any, Any]:
    if name == "allreduce":
        return None, default_hooks.allreduce_hook
    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    return commhooks.CommHookState(name, module=net, block_size=64), commhooks.comm_hook


def train(kind: Any, name: str, dtype: torch.dtype | None, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model = kind(net, **options)
    state, hook = state_and_hook(name, net)
    if dtype is not None:
        hook = WRAPPERS[dtype](hook)
    if kind is TorchDDP:
        dist._register_comm_hook(model.reducer, state, hook)  # bf16 is refused without NCCL
    else:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad(set_to_none=not options)
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    parameters = [p.detach() for p in net.parameters()]
    for mine in parameters:
        assert mine.dtype == torch.float32
        assert same_on_all_ranks(mine)
    return parameters


def convert(rank: int, size: int) -> None:
    for name in ("allreduce", "powersgd", "int8"):
        for dtype in WRAPPERS:
            theirs = train(TorchDDP, name, dtype)
            for options in ({}, {"gradient_as_bucket_view": True}):
                ours = train(commhooks.DistributedDataParallel, name, dtype, **options)
                for one, other in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(one, other, rtol=0, atol=2e-3)
    exact = train(commhooks.DistributedDataParallel, "allreduce", None)
    half = train(commhooks.DistributedDataParallel, "allreduce", torch.bfloat16)
    assert not torch.equal(exact[0], half[0])
    torch.testing.assert_close(exact, half, rtol=0, atol=2e-3)


def test_averages_in_half_precision_are_converted(run_ranks: Any) -> None:
    run_ranks(convert, 2)


def takes_int(state: object, bucket: int) -> Future[torch.Tensor]:
    raise NotImplementedError


def returns_int(state: object, bucket: dist.GradBucket) -> int:  # type: ignore[name-defined]
    raise NotImplementedError


def check_annotations(rank: int, size: int) -> None:
    for kind in (commhooks.DistributedDataParallel, TorchDDP):
        model = kind(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"bucket annotation should be dist.GradBucket"):
            model.register_comm_hook(None, takes_int)
        with pytest.raises(ValueError, match=r"return annotation should be torch.futures.Future"):
            model.register_comm_hook(None, returns_int)
        state, hook = state_and_hook("int8", model.module)
        model.register_comm_hook(state, hook)
    text: dict[str, Any] = {}
    source = (
        "from __future__ import annotations\n"
        "def hook(a, b: commhooks.GradBucket) -> Missing: ...\n"
        "def wrong(a, b: int) -> int: ...\n"
    )
    exec(source, {"commhooks": commhooks}, text)
    commhooks.DistributedDataParallel(nn.Linear(2, 2)).register_comm_hook(None, text["hook"])
    with pytest.raises(ValueError, match=r"GradBucket, found int"):
        commhooks.DistributedDataParallel(nn.Linear(2, 2)).register_comm_hook(None, text["wrong"])


def test_annotations_are_checked_as_torch_checks_them(run_ranks: Any) -> None:
    run_ranks(check_annotations, 1)
