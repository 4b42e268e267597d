"""Several models with hooks under one backward: no order between them may be needed."""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import wait_until
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.adapters import adapter
from commhooks.comm.stage_groups import StageGroups
from commhooks.runtime.stream_runner import StreamRunner

_FRESH_PAIRS = 50


@dataclass
class ThreeRounds(commhooks.CommHook):
    """Awaits more collectives than it tells, so that most connect in backward."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        buffer = bucket.buffer()
        first = comm.rank - comm.rank % 2
        await comm.among(range(first, first + 2)).broadcast(torch.ones(1))
        for _ in range(2):
            await comm.all_reduce(torch.ones(1))
        return (await comm.all_reduce(buffer)).div_(comm.size)


@dataclass
class Breaks(commhooks.CommHook):
    """Raises on rank 1 when it first comes to step 1."""

    has_raised: bool = field(default=False, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        await comm.all_reduce(torch.ones(1))
        if comm.rank == 1 and comm.step == 1 and not self.has_raised:
            self.has_raised = True
            raise ValueError("broken")
        return (await comm.all_reduce(bucket.buffer())).div_(comm.size)


def _own(module: nn.Module, group: Any = None) -> nn.Module:
    return commhooks.DistributedDataParallel(module, process_group=group)


def _torchs(module: nn.Module, group: Any = None) -> nn.Module:
    return TorchDistributedDataParallel(module, process_group=group)


def _sharded(module: nn.Module, group: Any = None) -> nn.Module:
    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("replicas", "one"))
    return fully_shard(module, mesh=mesh)


WRAPPERS: dict[str, Callable[..., nn.Module]] = {"own": _own, "torch": _torchs, "fsdp": _sharded}
HOOKS: dict[str, Any] = {
    "int8": "int8",
    "topk": {"name": "topk", "density": 0.5},
    "powersgd": {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 0},
    "onebit": "onebit",
    "connects in backward": ThreeRounds,
    "switches": {"name": "schedule", "stages": [[0, "allreduce"], [1, "skip_nonfinite"]]},
}
EXACT = ("connects in backward", "switches")


def _sum(models: list[nn.Module], x: Tensor) -> Tensor:
    return torch.stack([model(x).square().mean() for model in models]).sum()


def _chain(models: list[nn.Module], x: Tensor) -> Tensor:
    for model in models:
        x = model(x).tanh()
    return x.mean()


WAYS = {"sum": _sum, "chain": _chain}


def _gradients(models: list[nn.Module]) -> list[Tensor]:
    return [parameter.grad for model in models for parameter in model.parameters()]


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def _means(models: list[nn.Module], way: str, x: Tensor) -> list[Tensor]:
    """Return the means over the ranks of the gradients of a step, computed without hooks."""
    plain = [nn.Linear(6, 6).to(x.device) for _ in models]
    for ours, model in zip(plain, models, strict=True):
        for own, parameter in zip(ours.parameters(), model.parameters(), strict=True):
            own.detach().copy_(_local(parameter))
    WAYS[way](plain, x).backward()
    for gradient in _gradients(plain):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return _gradients(plain)


def train(
    rank: int,
    size: int,
    wrapper: str,
    hook: str,
    way: str,
    count: int,
    pairs: int,
    groups: bool,
    device: str = "cpu",
) -> None:
    """Accumulate gradients of fresh models, and compare them between the ranks.

    Those of exact hooks are also compared with the mean.
    """
    for _ in range(pairs):
        own = [dist.new_group() if groups else None for _ in range(count)]
        models = [WRAPPERS[wrapper](nn.Linear(6, 6).to(device), group) for group in own]
        chosen = HOOKS[hook]
        handles = [
            commhooks.register(model, chosen() if callable(chosen) else chosen) for model in models
        ]
        x = torch.full((2, 6), rank + 1.0, device=device)
        for _ in range(3):
            WAYS[way](models, x).backward()
        for gradient, mean in zip(_gradients(models), _means(models, way, x), strict=True):
            own_values = _local(gradient)
            others = [torch.empty_like(own_values) for _ in range(size)]
            dist.all_gather(others, own_values.contiguous())
            assert all(map(torch.equal, others, others[1:]))
            if hook in EXACT:
                torch.testing.assert_close(own_values, 3 * mean)
        for handle in handles:
            handle.remove()


@pytest.mark.covering(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("count", [2, 3])
def test_models_under_one_backward(
    run_ranks: Any, wrapper: str, hook: str, way: str, count: int
) -> None:
    run_ranks(train, 2, wrapper, hook, way, count, 3, groups=False)


@pytest.mark.parametrize("hook", ["int8", "connects in backward"])
def test_models_with_process_groups_of_their_own(run_ranks: Any, hook: str) -> None:
    run_ranks(train, 2, "own", hook, "sum", 2, 3, groups=True)


def train_in_order(rank: int, size: int, hook: str) -> None:
    """As on NCCL: hooks run on the thread of backward, which also connects."""
    threaded, adapter.ThreadedRunner = adapter.ThreadedRunner, StreamRunner
    try:
        train(rank, size, "own", hook, "sum", 2, 3, groups=False)
    finally:
        adapter.ThreadedRunner = threaded


@pytest.mark.parametrize("hook", ["int8", "connects in backward"])
def test_models_on_a_backend_that_keeps_the_order(run_ranks: Any, hook: str) -> None:
    run_ranks(train_in_order, 2, hook)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hook", ["int8", "connects in backward"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_many_fresh_pairs(run_ranks: Any, wrapper: str, hook: str) -> None:
    run_ranks(train, 2, wrapper, hook, "sum", 2, _FRESH_PAIRS, groups=False, timeout=120)


def share_an_encoder(rank: int, size: int, wrapper: str) -> list[Tensor]:
    """Two wrappers around heads with one encoder, whose gradient both average."""
    encoder = nn.Linear(6, 6)
    heads = [nn.Sequential(encoder, nn.Linear(6, 1)) for _ in range(2)]
    models = [WRAPPERS[wrapper](head) for head in heads]
    plain = copy.deepcopy(heads)
    for model in models:
        commhooks.register(model, ThreeRounds())
    for _ in range(3):
        _sum(models, torch.full((2, 6), rank + 1.0)).backward()
    for peer in range(size):
        (3 / size * _sum(plain, torch.full((2, 6), peer + 1.0))).backward()
    for gradient, mean in zip(_gradients(heads), _gradients(plain), strict=True):
        torch.testing.assert_close(gradient, mean)
    return _gradients(models)


@pytest.mark.parametrize("wrapper", ["own", "torch"])
def test_an_encoder_in_two_wrappers(run_ranks: Any, wrapper: str) -> None:
    first, second = run_ranks(share_an_encoder, 2, wrapper)
    assert all(map(torch.equal, first, second))


def break_one(rank: int, size: int, wrapper: str) -> list[Tensor]:
    models = [WRAPPERS[wrapper](nn.Linear(6, 6)) for _ in range(2)]
    commhooks.register(models[0], Breaks())
    commhooks.register(models[1], ThreeRounds())
    for step in range(4):
        for model in models:
            model.zero_grad()
        loss = _sum(models, torch.full((2, 6), rank + 1.0))
        if step == 1:
            with pytest.raises(commhooks.CommHookError, match="broken"):
                loss.backward()
        else:
            loss.backward()
    means = _means(models, "sum", torch.full((2, 6), rank + 1.0))
    for gradient, mean in zip(_gradients(models), means, strict=True):
        torch.testing.assert_close(gradient, mean)
    return _gradients(models)


@pytest.mark.parametrize("wrapper", ["own", "torch"])
def test_a_failure_in_one_of_two_models(run_ranks: Any, wrapper: str) -> None:
    """The step fails on both ranks, and both models go on after it."""
    first, second = run_ranks(break_one, 2, wrapper)
    assert all(map(torch.equal, first, second))


def connect_late(rank: int, size: int, hook: str, options: dict[str, Any]) -> list[str]:
    """Return what connects in backward."""
    model = commhooks.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    handle = commhooks.register(model, hook, **options)
    connects, found = StageGroups._connect, []

    def connect(groups: StageGroups, stage: int, ranks: tuple[int, ...]) -> Any:
        found.append(f"stage {stage} among {ranks}")
        return connects(groups, stage, ranks)

    StageGroups._connect = connect
    try:
        for _ in range(3):
            model(torch.randn(4, 64)).sum().backward()
    finally:
        StageGroups._connect = connects
    handle.remove()
    return found


KNOWN: list[tuple[str, dict[str, Any]]] = [
    ("int8", {}),
    ("bf16", {"two_shot": True}),
    ("threshold", {"value": 1e-3}),
    ("topk", {}),
    ("shared_topk", {}),
    ("powersgd", {"start_step": 0}),
    ("powersgd", {"start_step": 0, "two_sided": False}),
    ("powersgd", {"start_step": 0, "num_iters_per_step": 2}),
    ("gossip", {}),
    ("noop", {}),
    ("local_sgd", {"period": 2, "start_step": 1, "ranks_per_node": 2}),
    ("diloco", {"period": 2, "inner": "int8"}),
    ("error_feedback", {"inner": "qsgd"}),
    ("skip_nonfinite", {"inner": "int8"}),
    ("schedule", {"stages": [[0, "allreduce"], [2, "int8"]]}),
    ("hierarchical", {"inner": "int8", "ranks_per_node": 2}),
    ("hierarchical", {"inner": "int8", "ranks_per_node": 2, "sharded": False}),
    ("hierarchical", {"inner": "int8", "ranks_per_node": 1}),
    ("hierarchical", {"inner": "int8", "ranks_per_node": 4}),
    (
        "hierarchical",
        {
            "inner": {"name": "hierarchical", "inner": "int8", "ranks_per_node": 2},
            "ranks_per_node": 1,
        },
    ),
]


@pytest.mark.parametrize(("hook", "options"), KNOWN, ids=[f"{h} {o}" for h, o in KNOWN])
def test_registration_connects_what_is_known(
    run_ranks: Any, hook: str, options: dict[str, Any]
) -> None:
    assert run_ranks(connect_late, 4, hook, options) == [[]] * 4


def register_alone(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(6, 6))
    meets = StageGroups._meet

    def stay_away(groups: StageGroups, stage: int, name: str, ranks: tuple[int, ...]) -> None:
        if stage == 1 and rank == 1:
            raise RuntimeError("wait timed out")  # as from a store that does not answer
        meets(groups, stage, name, ranks)

    StageGroups._meet = stay_away
    try:
        with pytest.raises(commhooks.CommHookPeerError, match="collective 1 of a hook") as raised:
            commhooks.register(model, "int8")
    finally:
        StageGroups._meet = meets
    assert "Restart" not in str(raised.value)
    handle = commhooks.register(model, "onebit")
    model(torch.ones(2, 6)).sum().backward()
    handle.remove()


def test_a_registration_that_cannot_connect_changes_nothing(run_ranks: Any) -> None:
    run_ranks(register_alone, 2, timeout=10)


def watching() -> int:
    return sum(thread.name == "commhooks-watch" for thread in threading.enumerate())


def remove_before_the_first_step(rank: int, size: int) -> tuple[int, int]:
    wait_until(lambda: not watching())  # threads of earlier tests
    model = commhooks.DistributedDataParallel(nn.Linear(6, 6))
    handle = commhooks.register(model, "int8")
    before = watching()
    handle.remove()
    wait_until(lambda: not watching())
    return before, watching()


def test_a_hook_that_never_ran_closes_its_connections(run_ranks: Any) -> None:
    assert run_ranks(remove_before_the_first_step, 2) == [(1, 0)] * 2
