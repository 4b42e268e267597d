"""The state of hooks of sharded models in torch.distributed.checkpoint, read by other ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.sharded import FEATURES, build, mesh_of, train
from support.states import hook_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.state import HookState
from commhooks.testing.compare import same_bits

HOOKS: dict[str, dict[str, Any]] = {
    "int4": {"name": "int4"},
    "diloco": {"name": "diloco", "period": 1},
}
POWERSGD = {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 1.0}
FEATURE = FEATURES["second dimension"]
State = dict[str, dict[str, Tensor]]


def sharded(shape: tuple[int, int], config: Any) -> tuple[Any, commhooks.HookHandle]:
    net = build(mesh_of(*shape), FEATURE)
    return net, commhooks.register(net, commhooks.create(config))


def whole_state(handle: commhooks.HookHandle, shape: tuple[int, int]) -> State:
    """Put together the shards of a replica. Unsent averages count as errors."""
    net_shape, state = handle.adapter.whole, hook_state(handle)
    row = next(iter(handle.adapter.shard_groups), None)
    whole: State = {}
    for name in sorted(state):
        entry = dict(state[name])
        if "average_error" in entry:
            start, error = int(entry.pop("average_start")), entry.pop("average_error")
            entry["error"] = entry["error"].clone()
            entry["error"].view(-1)[start : start + error.numel()] += shape[0] * error
        found = net_shape(name)
        assert found is not None
        size, dim = found
        for field, value in entry.items():
            shards = [torch.empty_like(value) for _ in range(shape[1])] if row else [value]
            if row:
                torch.distributed.all_gather(shards, value.contiguous(), group=row)
            full = torch.cat(shards, dim).narrow(dim, 0, size[dim])
            whole.setdefault(name, {})[field] = full
    return whole


def save(rank: int, size: int, shape: tuple[int, int], folder: str) -> dict[str, State]:
    states = {}
    for name, config in HOOKS.items():
        net, handle = sharded(shape, config)
        train(net, rank, 2, FEATURE)
        dcp.save({"hook": HookState(handle)}, checkpoint_id=f"{folder}/{name}")
        _, again = sharded(shape, config)
        path = f"{folder}/{name}"
        dcp.load({"hook": HookState(again, path)}, checkpoint_id=path)
        assert same_bits(again.state_dict(), handle.state_dict())
        states[name] = whole_state(handle, shape)
    net, handle = sharded(shape, POWERSGD)
    train(net, rank, 1, FEATURE)
    dcp.save({"hook": HookState(handle)}, checkpoint_id=f"{folder}/powersgd")
    return states


def load(rank: int, size: int, shape: tuple[int, int], folder: str) -> dict[str, State]:
    states = {}
    for name, config in HOOKS.items():
        net, handle = sharded(shape, config)
        path = f"{folder}/{name}"
        dcp.load({"hook": HookState(handle, path)}, checkpoint_id=path)
        states[name] = whole_state(handle, shape)
        train(net, rank, 1, FEATURE)
    _, handle = sharded(shape, POWERSGD)
    path = f"{folder}/powersgd"
    with pytest.raises(
        commhooks.CommHookStateError, match=r"field '(right|error)' of '.*' belongs to a shard"
    ):
        dcp.load({"hook": HookState(handle, path)}, checkpoint_id=path)
    return states


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((2, 2), (1, 3)),
        ((2, 1), (1, 3)),  # the last rank needs nothing of the former run
        pytest.param((2, 2), (4, 1), marks=pytest.mark.exhaustive),
    ],
)
def test_other_replicas_and_shards_get_the_mean(
    run_ranks: Any, old: tuple[int, int], new: tuple[int, int], tmp_path: Path
) -> None:
    saved = run_ranks(save, old[0] * old[1], old, str(tmp_path))
    for loaded in run_ranks(load, new[0] * new[1], new, str(tmp_path)):
        for hook in HOOKS:
            assert loaded[hook].keys() == saved[0][hook].keys() != set()
            for name, entry in loaded[hook].items():
                for field, value in entry.items():
                    mean = (saved[0][hook][name][field] + saved[old[1]][hook][name][field]) / 2
                    torch.testing.assert_close(value, mean)


def train_stages(
    rank: int, size: int, folder: str, dims: tuple[str, ...], shards: int, steps: int
) -> Tensor:
    """Two stages with the same names, sharded over their own ranks. Return the errors."""
    sizes = {"stage": 2, "data": size // (2 * shards), "shard": shards}
    mesh = init_device_mesh("cpu", tuple(sizes[dim] for dim in dims), mesh_dim_names=dims)
    stage = mesh["stage"].get_local_rank()
    net = nn.Linear(4, 4)
    fully_shard(
        net,
        mesh=DeviceMesh.from_group(
            [mesh.get_group("data"), mesh.get_group("shard")],
            "cpu",
            mesh=mesh.mesh.movedim(dims.index("stage"), 0)[stage],
            mesh_dim_names=("data", "shard"),
        ),
    )
    handle = commhooks.register(net, "topk", density=0.2, warmup_steps=0)
    if steps == 0:
        dcp.load({"hook": HookState(handle, folder)}, checkpoint_id=folder)
    for step in range(steps):
        net(torch.full((3, 4), 1.0 + step + rank)).square().sum().backward()
    if steps > 0:
        dcp.save({"hook": HookState(handle)}, checkpoint_id=folder)
    return handle.hook.state["weight"]["error"]


@pytest.mark.parametrize(
    ("dims", "shards", "old", "new"),
    [
        (("stage", "data", "shard"), 1, 2, 1),
        (("data", "stage", "shard"), 1, 1, 2),
        (("stage", "data", "shard"), 2, 1, 2),
        (("data", "stage", "shard"), 2, 1, 2),
    ],
)
def test_another_number_of_sharded_replicas_of_each_stage(
    run_ranks: Any, dims: tuple[str, ...], shards: int, old: int, new: int, tmp_path: Path
) -> None:
    """Each stage gets the mean of its own old replicas."""

    def by_replica(replicas: int, steps: int) -> Tensor:
        ranks = 2 * shards * replicas
        found = torch.stack(run_ranks(train_stages, ranks, str(tmp_path), dims, shards, steps))
        sizes = [{"stage": 2, "data": replicas, "shard": shards}[dim] for dim in dims]
        return found.unflatten(0, sizes).movedim(dims.index("data"), 0)

    mean = by_replica(old, 3).mean(0)
    torch.testing.assert_close(by_replica(new, 0), mean.expand(new, *mean.shape))
