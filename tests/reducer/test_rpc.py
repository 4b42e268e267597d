"""Backward inside a torch.distributed.autograd context, which holds the gradients."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel

pytestmark = pytest.mark.skipif(not dist.rpc.is_available(), reason="torch without RPC")


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def train(rank: int, world_size: int, view: bool, hook: str | None, file: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    options = dist.rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}")
    dist.rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options
    )
    try:
        model = DistributedDataParallel(make_net(), gradient_as_bucket_view=view)
        if hook is not None:
            commhooks.register(model, hook)
        reference = make_net()
        tolerance = {} if hook is None else {"rtol": 2**-7, "atol": 1e-3}
        for step in range(3):
            x = [torch.full((2, 4), float(peer + step + 1)) for peer in range(world_size)]
            reference.zero_grad()
            for peer in range(world_size):
                (reference(x[peer]).square().sum() / world_size).backward()
            with dist.autograd.context() as context:
                dist.autograd.backward(context, [model(x[rank]).square().sum()])
                gradients = dist.autograd.get_gradients(context)
                for ours, theirs in zip(
                    model.module.parameters(), reference.parameters(), strict=True
                ):
                    assert ours.grad is None
                    torch.testing.assert_close(gradients[ours], theirs.grad, **tolerance)
    finally:
        dist.rpc.shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", [None, "bf16"])
def test_gradients_in_a_context_are_averaged(view: bool, hook: str | None, tmp_path: Path) -> None:
    run_ranks(train, 2, view, hook, str(tmp_path / "ranks"))
    commhooks.testing.close_ranks()  # RPC leaves threads in the processes
