"""The state of hooks in torch.distributed.checkpoint, read by the same and by other ranks."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.pages import blocks_of
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh

import commhooks
from commhooks.hook.base import tree
from commhooks.hook.state import StateField
from commhooks.state import GatheredState, HookState
from commhooks.state.files import add_state, load_state_of, load_states, save_states
from commhooks.state.layout import DistributedModel, Layout, Source
from commhooks.state.resharding import Resharding
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

WITHOUT_CHECKPOINT = r"checkpoint that dcp.load reads, found none: .*HookState\(handle, checkpoint"
POWERSGD = {"rank": 2, "start_step": 0, "min_compression_rate": 1.0}
HOOKS: dict[str, dict[str, Any]] = {
    "int4": {"name": "int4"},
    "dgc": {"name": "dgc"},
    "powersgd": {"name": "powersgd", **POWERSGD},
    "one side": {"name": "powersgd", "two_sided": False, **POWERSGD},
    "batched": {"name": "batched_powersgd", **POWERSGD},
    "diloco": {"name": "diloco", "period": 1},
    "delayed": {"name": "diloco", "period": 1, "delay": 1},
    "push_sum": {"name": "push_sum"},
    "no state": {"name": "bf16"},
    "schedule": {
        "name": "schedule",
        "stages": [[0, {"name": "error_feedback", "inner": "bf16"}], [1, "int4"], [9, "topk"]],
    },
}


def trained(config: Any, rank: int, steps: int, *, torch_ddp: bool = False) -> Trainer:
    options: dict[str, Any] = {"find_unused_parameters": True} if torch_ddp else {}
    options |= {} if torch_ddp else {"stable_buckets": True}
    trainer = Trainer(commhooks.create(config), torch_ddp=torch_ddp, **options)
    for step in range(steps):
        trainer.step(draw_gradients(trainer.parameters, rank, step))
    return trainer


NODES = {
    name: {"name": "hierarchical", "inner": "int4", "ranks_per_node": 2, "sharded": sharded}
    for name, sharded in (("shards", True), ("leaders", False))
}

ALL = HOOKS | NODES


def round_trip(rank: int, size: int, folder: str, names: list[str]) -> None:
    stock = [(name, True) for name in ("int4", "batched") if name in names]
    for name, torch_ddp in [*((name, False) for name in names), *stock]:
        path = f"{folder}/{name} {torch_ddp}"
        saved = trained(ALL[name], rank, 2, torch_ddp=torch_ddp)
        if torch_ddp:
            dcp.async_save({"hook": HookState(saved.handle)}, checkpoint_id=path).result()
        else:
            dcp.save({"hook": HookState(saved.handle)}, checkpoint_id=path)
        loaded = trained(ALL[name], rank, 0, torch_ddp=torch_ddp)
        dcp.load({"hook": HookState(loaded.handle, path)}, checkpoint_id=path)
        assert same_bits(loaded.handle.state_dict(), saved.handle.state_dict()), name
        steps = [each.step(draw_gradients(each.parameters, rank, 3)) for each in (saved, loaded)]
        changes = any(each.changes_parameters for each in tree(saved.handle.hook))
        assert same_bits(*steps) or changes, name


def test_the_same_ranks_get_their_states(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(round_trip, 2, str(tmp_path), list(HOOKS))


def save_parts(rank: int, size: int, folder: str) -> None:
    """Ranks 0 and 2 train one part of a model, ranks 1 and 3 another, with the same names."""
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "part")).get_group("data")

    def part(steps: int) -> commhooks.HookHandle:
        model = commhooks.DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        handle = commhooks.register(model, "int4")
        for step in range(steps):
            draw = torch.Generator().manual_seed(size * step + rank)
            model(torch.randn(3, 4, generator=draw)).square().sum().backward()
        return handle

    saved = part(3)
    dcp.save({"hook": HookState(saved)}, checkpoint_id=folder)
    gathered = [GatheredState(saved).state_dict()]
    torch.distributed.broadcast_object_list(gathered)
    of_dcp, of_one_file, of_itself = part(0), part(0), part(0)
    dcp.load({"hook": HookState(of_dcp, folder)}, checkpoint_id=folder)
    of_one_file.load_state_dict(gathered[0])
    of_itself.load_state_dict(saved.state_dict())
    for loaded in (of_dcp, of_one_file, of_itself):
        assert same_bits(loaded.state_dict(), saved.state_dict())
    moved = {
        name: {key.replace("part 1", "part 7"): it for key, it in gathered[0][name].items()}
        for name in ("state", "tensors")
    }
    with (
        pytest.raises(commhooks.CommHookStateError, match=r"part 1 of .* found those of \[0, 7\]")
        if rank % 2
        else contextlib.nullcontext()
    ):
        part(0).load_state_dict(gathered[0] | moved)


def test_each_part_of_a_model_gets_its_own_state(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(save_parts, 4, str(tmp_path))


def train_stages(rank: int, size: int, folder: str, steps: int, stages: int = 3) -> Tensor:
    """Stages with the same names, in a mesh whose first dimension is theirs."""
    shape = (stages, size // stages)
    group = init_device_mesh("cpu", shape, mesh_dim_names=("stage", "data"))["data"]
    model = commhooks.DistributedDataParallel(nn.Linear(4, 4), process_group=group.get_group())
    handle = commhooks.register(model, "topk", density=0.2, warmup_steps=0)
    if steps == 0:
        dcp.load({"hook": HookState(handle, folder)}, checkpoint_id=folder)
    for step in range(steps):
        draw = torch.Generator().manual_seed(size * step + rank)
        model(torch.randn(3, 4, generator=draw)).square().sum().backward()
    if steps > 0:
        dcp.save({"hook": HookState(handle)}, checkpoint_id=folder)
    return handle.hook.state["weight"]["error"]


def test_another_number_of_replicas_of_each_stage(run_ranks: Any, tmp_path: Path) -> None:
    """The first ranks of the stages were 0, 2 and 4, and become 0, 1 and 2."""
    errors = run_ranks(train_stages, 6, str(tmp_path), 3)
    for stage, found in enumerate(run_ranks(train_stages, 3, str(tmp_path), 0)):
        torch.testing.assert_close(found, (errors[2 * stage] + errors[2 * stage + 1]) / 2)
    with pytest.raises(commhooks.CommHookStateError, match=r"found those of \[0, 2, 4\]"):
        run_ranks(train_stages, 2, str(tmp_path), 0, 2)


def refuse_nodes(rank: int, size: int, folder: str) -> None:
    for name, config in NODES.items():
        trainer = trained(config, rank, 0)
        path = f"{folder}/{name} False"
        with pytest.raises(commhooks.CommHookError, match=r"4x1 replicas x shards.*parts of them"):
            dcp.load({"hook": HookState(trainer.handle, path)}, checkpoint_id=path)


def test_each_rank_of_a_node_gets_its_own_state(run_ranks: Any, tmp_path: Path) -> None:
    """Ranks of a node have states for other parts of parameters, or none."""
    run_ranks(round_trip, 4, str(tmp_path), list(NODES))
    run_ranks(refuse_nodes, 2, str(tmp_path))


def save_all(rank: int, size: int, folder: str, names: list[str]) -> dict[str, Any]:
    states = {}
    for name in names:
        trainer = trained(HOOKS[name], rank, 2)
        dcp.save({"hook": HookState(trainer.handle)}, checkpoint_id=f"{folder}/{name}")
        states[name] = {"state": trainer.state()}
    return states


def load_all(rank: int, size: int, folder: str, names: list[str]) -> dict[str, Any]:
    states = {}
    for name in names:
        trainer = trained(HOOKS[name], rank, 0)
        path = f"{folder}/{name}"
        dcp.load({"hook": HookState(trainer.handle, FileSystemReader(path))}, checkpoint_id=path)
        states[name] = {**trainer.handle.state_dict(), "state": trainer.state()}
        trainer.step(draw_gradients(trainer.parameters, rank, 3))
    return states


def unsent(entry: dict[str, Tensor], like: Tensor, ranks: int) -> Tensor:
    """The error of a parameter, with what its rank has yet to send of averages."""
    total = torch.empty_like(like, dtype=torch.float64).copy_(entry["error"])
    if "average_error" in entry:
        flat = total.as_strided((total.numel(),), (1,))
        start, error = int(entry["average_start"]), entry["average_error"]
        flat[start : start + error.numel()] += ranks * error
    return total


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_get_the_mean(run_ranks: Any, ranks: int, tmp_path: Path) -> None:
    names = ["int4", "dgc", "powersgd", "batched", "diloco", "push_sum"]
    saved = run_ranks(save_all, 2, str(tmp_path), names)
    for loaded in run_ranks(load_all, ranks, str(tmp_path), names):
        for name in names:
            found, expected = loaded[name], [each[name] for each in saved]
            assert found["step"] == 2
            assert found["state"].keys() == expected[0]["state"].keys()
            for key, entry in found["state"].items():
                old = [each["state"][key] for each in expected]
                for field, value in entry.items():
                    if field in ("left", "right", "anchor", "momentum"):
                        assert same_bits(value, old[0][field])
                    elif name == "int4":
                        like = probe_parameters()[key]
                        mean = sum(unsent(each, like, 2) for each in old) / 2
                        torch.testing.assert_close(value.double(), mean)
                        assert entry.keys() == {"error"}
                    else:
                        mean = (old[0][field] + old[1][field]) / 2
                        torch.testing.assert_close(value, mean)


class Undeclared(commhooks.CommHook):
    async def reduce(self, bucket: Any, comm: Any) -> Tensor:
        for name in bucket.names:
            self.state.setdefault(name, {})["calls"] = torch.tensor(bucket.step)
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


class AppState:
    """The pattern of torch's tutorial: one object with the states of all."""

    def __init__(self, *handles: Any, path: str | None = None, keys: Any = (None, None)) -> None:
        self.hooks = [HookState(each, path, key) for each, key in zip(handles, keys, strict=False)]

    def state_dict(self) -> dict[str, Any]:
        return {f"{i}": each.state_dict() for i, each in enumerate(self.hooks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, each in enumerate(self.hooks):
            each.load_state_dict(state[f"{i}"])


def save_others(rank: int, size: int, folder: str) -> None:
    one, two = (trained(HOOKS[name], rank, 2).handle for name in ("int4", "dgc"))
    dcp.save({"1": HookState(one), "2": HookState(two)}, checkpoint_id=f"{folder}/two")
    dcp.save({"app": AppState(one)}, checkpoint_id=f"{folder}/app")
    dcp.save({"app": AppState(one, two)}, checkpoint_id=f"{folder}/apps")
    handle = Trainer(Undeclared()).handle
    trainer = Trainer(Undeclared())
    trainer.step(draw_gradients(trainer.parameters, rank, 0))
    dcp.save({"hook": HookState(trainer.handle)}, checkpoint_id=f"{folder}/undeclared")

    new_one, new_two = (trained(HOOKS[name], rank, 0).handle for name in ("int4", "dgc"))
    path = f"{folder}/two"
    states = {"1": HookState(new_one, path, "1"), "2": HookState(new_two, path, "2")}
    dcp.load(states, checkpoint_id=path)
    assert same_bits(new_one.state_dict(), one.state_dict())
    assert same_bits(new_two.state_dict(), two.state_dict())
    dcp.save(states, checkpoint_id=f"{folder}/again")  # the checkpoint counts for one load
    path = f"{folder}/again"
    new_one = trained(HOOKS["int4"], rank, 0).handle
    dcp.load({"1": HookState(new_one, path, "1")}, checkpoint_id=path)
    assert same_bits(new_one.state_dict(), one.state_dict())

    new_one, new_two = (trained(HOOKS[name], rank, 0).handle for name in ("int4", "dgc"))
    path = f"{folder}/app"
    dcp.load({"app": AppState(new_one, path=path)}, checkpoint_id=path)
    assert same_bits(new_one.state_dict(), one.state_dict())
    path = f"{folder}/apps"
    app = AppState(new_one, new_two, path=path)
    with pytest.raises(commhooks.CommHookStateError, match=r"found 'app.0', 'app.1'; name one"):
        dcp.load({"app": app}, checkpoint_id=path)
    app = AppState(new_one, new_two, path=path, keys=("app.0", "app.1"))
    dcp.load({"app": app}, checkpoint_id=path)
    assert same_bits(new_two.state_dict(), two.state_dict())
    with pytest.raises(commhooks.CommHookStateError, match="of hook 'dgc', found that of 'int4'"):
        dcp.load({"1": HookState(new_two, f"{folder}/two", "1")}, checkpoint_id=f"{folder}/two")
    fresh = HookState(trained(HOOKS["dgc"], rank, 0).handle)
    with pytest.raises(commhooks.CommHookStateError, match=WITHOUT_CHECKPOINT):
        dcp.load({"2": fresh}, checkpoint_id=f"{folder}/two")
    assert same_bits(HookState(two).state_dict(), two.state_dict())
    path = f"{folder}/undeclared"
    dcp.load({"hook": HookState(handle, path)}, checkpoint_id=path)
    assert same_bits(handle.state_dict(), trainer.handle.state_dict())
    function = commhooks.register(
        commhooks.DistributedDataParallel(nn.Linear(2, 2)), lambda state, bucket: None
    )
    with pytest.raises(commhooks.CommHookStateError, match="torch-style function"):
        dcp.save({"hook": HookState(function)}, checkpoint_id=f"{folder}/function")
    torch.save(one.state_dict(), f"{folder}/{rank}.pt")
    gathered = GatheredState(one).state_dict()
    if rank == 0:
        torch.save(gathered, f"{folder}/all.pt")


def load_others(rank: int, size: int, folder: str) -> None:
    handle = Trainer(Undeclared()).handle
    path = f"{folder}/undeclared"
    with pytest.raises(commhooks.CommHookStateError, match=r"2x1 .* on 1x1, .* not declare"):
        dcp.load({"hook": HookState(handle, path)}, checkpoint_id=path)
    handle = trained(HOOKS["int4"], rank, 1).handle
    with pytest.raises(commhooks.CommHookStateError, match=WITHOUT_CHECKPOINT):
        dcp.load({"1": HookState(handle)}, checkpoint_id=f"{folder}/two")
    handle = trained(HOOKS["int4"], rank, 0).handle
    with pytest.raises(commhooks.CommHookStateError, match=r"found .* of rank 0 of 2x1.*HookState"):
        handle.load_state_dict(torch.load(f"{folder}/0.pt"))
    parts = [torch.load(f"{folder}/{name}.pt") for name in ("0", "1")]
    whole = {**parts[0], "state": parts[0]["state"] | parts[1]["state"]}
    whole["tensors"] = parts[0]["tensors"] | parts[1]["tensors"]
    found = []
    for state in (whole, torch.load(f"{folder}/all.pt")):
        trainer = trained(HOOKS["int4"], rank, 0)
        trainer.handle.load_state_dict(state)
        found.append(trainer.state())
    errors = [
        part["matrix"]["error"] for source, part in whole["state"].items() if "rank" in source
    ]
    assert len(errors) == 2
    assert same_bits(*found)
    assert found[0]["matrix"].keys() == {"error"}


def test_keys_and_refusals(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(save_others, 2, str(tmp_path))
    run_ranks(load_others, 1, str(tmp_path))


class OnDevice(Tensor):
    """A tensor on a device of another rank, which this one cannot read it to."""

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.as_subclass(Tensor)

    def __reduce_ex__(self, _: Any) -> Any:
        raise AssertionError("sent with its device")


def gather_from_devices(rank: int, size: int) -> None:
    trainer = trained(HOOKS["int4"], rank, 1)
    expected = GatheredState(trainer.handle).state_dict()
    for entry in trainer.hook.state.values():
        entry["error"] = entry["error"].as_subclass(OnDevice)
    with patch.object(OnDevice, "clone", OnDevice.detach):  # keeps its class, as on a device
        assert same_bits(GatheredState(trainer.handle).state_dict(), expected)


def test_states_are_gathered_in_host_memory(run_ranks: Any) -> None:
    """Rank 0 may have one device, and the states of all nodes may not fit there."""
    run_ranks(gather_from_devices, 2)


def save_without_a_hook(rank: int, size: int, folder: str) -> None:
    """As integrations do after the user's script has removed the hook."""
    trainer = trained(HOOKS["int4"], rank, 1)
    trainer.handle.remove()
    checkpoint: dict[str, Any] = {}
    add_state(trainer.handle, checkpoint)
    load_state_of(trainer.handle, checkpoint)
    save_states({"model": trainer.handle}, folder)
    load_states({"model": trainer.handle}, folder)
    assert not checkpoint


def test_a_removed_hook_has_no_state(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(save_without_a_hook, 2, str(tmp_path))


@dataclass
class Measured(commhooks.CommHook):
    """Keeps something of its rank only, which counts in the mean over the ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.devices: list[str] = []

    def state_fields(self, gradient: Tensor) -> Any:
        return StateField.like(gradient, "error", "averageable"), StateField("own", "own", (1,))

    def keep_own(self, mean: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        self.devices += [tensor.device.type for tensor in (*mean.values(), *own.values())]


def test_a_state_of_another_device_is_converted_on_that_of_the_gradients() -> None:
    model: Any = DistributedModel()
    model.device, model.parameters = torch.device("meta"), {"w": torch.zeros(2)}
    model._group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    hook, old = Measured(), Layout(2, 1)
    entry = {"error": torch.ones(2), "own": torch.ones(1)}
    Resharding(hook, model, old).add({Source("rank", 1, old, 0): {"w": entry}})
    assert hook.devices == ["meta", "meta"]


def resume_without(rank: int, size: int, folder: str) -> None:
    """Checkpoints from before hooks were used, or of a run whose hook is not used any more."""
    net = nn.Linear(2, 2)
    path = f"{folder}/plain"
    dcp.save({"net": net, "app": {"epoch": 3}}, checkpoint_id=path)
    expected = [p.detach().clone() for p in net.parameters()]
    for name in ("int4", "powersgd", "no state"):
        fresh = trained(HOOKS[name], rank, 0)
        for steps in (0, 2):  # a hook that has trained drops what belongs to other weights
            trainer = trained(HOOKS[name], rank, steps)
            nn.init.zeros_(net.weight)
            with pytest.warns(UserWarning, match="no state of a hook, so .* begins without"):
                dcp.load({"net": net, "hook": HookState(trainer.handle, path)}, checkpoint_id=path)
            assert same_bits([p.detach() for p in net.parameters()], expected)
            assert same_bits(trainer.handle.state_dict(), fresh.handle.state_dict()), name
        fresh.step(draw_gradients(fresh.parameters, rank, 0))
    app = AppState(trained(HOOKS["int4"], rank, 2).handle, path=path)
    with pytest.warns(UserWarning, match="no state of a hook"):
        dcp.load({"app": app}, checkpoint_id=path)

    saved = trained(HOOKS["int4"], rank, 2).handle
    path = f"{folder}/hook"
    dcp.save({"net": net, "hook": HookState(saved)}, checkpoint_id=path)
    with pytest.raises(
        commhooks.CommHookStateError, match=r"of a hook at 'hook0' .* found 'hook'; name one"
    ):
        dcp.load({"hook0": HookState(saved, path, "hook0")}, checkpoint_id=path)
    dcp.load({"net": net}, checkpoint_id=path)


def test_checkpoints_without_the_state_of_a_hook(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(resume_without, 2, str(tmp_path))


def run_page(rank: int, size: int, folder: str) -> None:
    handle = trained(HOOKS["int4"], rank, 1).handle
    (block,) = blocks_of("integrations/checkpoint.md")
    with contextlib.chdir(folder):
        exec(block, {"handle": handle, "net": nn.Linear(2, 2)})


def test_page(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(run_page, 2, str(tmp_path))
