"""Hooks on backends with the names and constructors of torch's for NCCL, which send by Gloo."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import same_on_all_ranks
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo

import commhooks
from commhooks.runtime.stream_runner import StreamRunner
from reducer.backends import family_named, family_of

CPU = torch.device("cpu")
OPTIONS = {
    "int8": {"block_size": 64},
    "hierarchical": {"inner": "allreduce", "ranks_per_node": 2},
    "diloco": {"period": 2, "delay": 1},
}


class NCCL(ProcessGroupGloo):
    """Connects as ``ProcessGroupNCCL`` does: for the device of the first collective, or at once."""

    connected: torch.device | None = None
    is_shut_down = False

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options)

    def name(self) -> str:
        return "nccl"

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected = device

    def shutdown(self) -> None:
        self.is_shut_down = True


class NCCL2(NCCL):
    """Takes the device as ``ProcessGroupNCCL2`` of torch 2.15 does, and none later."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        options: Any,
        device_id: torch.device | None = None,
    ) -> None:
        super().__init__(store, rank, size, options)
        assert device_id is not None, "it would take the device of LOCAL_RANK"
        self.device = device_id

    def name(self) -> str:
        return "nccl2"

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == self.device
        super().eager_connect_single_device(device)


_MADE: list[NCCL] = []  # the group refers to their C++ part only


def group_of(kind: type[NCCL]) -> dist.ProcessGroup:
    """Return a group of all ranks whose backend is a ``kind``."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> NCCL:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        backend = kind(store, rank, size, options, *([CPU] if kind is not NCCL else []))
        _MADE.append(backend)
        return backend

    dist.Backend.register_backend("stand_in", make, devices=["cpu"])
    group = dist.new_group(backend="stand_in")
    assert group is not None
    return group


def train(hook: str, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model = commhooks.DistributedDataParallel(net, process_group=group, host_memory=False)
    handle = commhooks.register(model, hook, **OPTIONS.get(hook, {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    handle._adapter.drain()
    parameters = [p.detach().clone() for p in net.parameters()]
    if group is not None:
        runner = handle._adapter._runner
        assert isinstance(runner, StreamRunner)
        own = [
            each
            for groups in runner._private.values()
            for stages in groups._groups.values()
            for each in stages
        ]
        assert bool(own) == (hook != "int8")
        kind = type(group._get_backend(CPU))
        assert all(type(each) is kind and each.connected == CPU for each in own)  # type: ignore[attr-defined]
        handle.remove()
        assert all(each.is_shut_down for each in own)  # type: ignore[attr-defined]
    return parameters


def train_on(rank: int, size: int, kind: type[NCCL]) -> None:
    group = group_of(kind)
    assert family_of(group, CPU) == "nccl"
    for hook in OPTIONS:
        found, expected = train(hook, group), train(hook, None)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
            if hook != "diloco":
                assert same_on_all_ranks(mine)


@pytest.mark.parametrize("kind", [NCCL, NCCL2])
def test_every_nccl_of_torch_trains(run_ranks: Any, kind: type[NCCL]) -> None:
    run_ranks(train_on, 4, kind)


def refuse_others(rank: int, size: int) -> None:
    class Elsewhere(NCCL):
        def name(self) -> str:
            return "elsewhere"

    model = commhooks.DistributedDataParallel(nn.Linear(2, 2), process_group=group_of(NCCL))
    backend: Any = model.process_group._get_backend(CPU)
    backend.__class__ = Elsewhere
    with pytest.raises(commhooks.CommHookError, match=r"works on gloo, nccl; .* uses 'elsewhere'"):
        commhooks.register(model, "int8")


def test_other_backends_are_named(run_ranks: Any) -> None:
    run_ranks(refuse_others, 2)


@pytest.mark.parametrize(
    ("name", "family"),
    [("nccl2", "nccl"), ("nccl-lazy", "nccl"), ("nccl", "nccl"), ("gloo", "gloo"), ("ucc", "ucc")],
)
def test_families(name: str, family: str) -> None:
    assert family_named(name) == family
