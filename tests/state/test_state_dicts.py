"""State dicts of torch.distributed.checkpoint: those of this wrapper, of torch's, and of none."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks import DistributedDataParallel

NAMES = {f"{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")}
WRAPPERS: dict[str, Any] = {
    "ours": DistributedDataParallel,
    "torch's": TorchDDP,
    "none": lambda net: net,
}


def make(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = WRAPPERS[kind](net)
    if kind == "ours":
        commhooks.register(model, "allreduce")
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Train; a model without a wrapper gets the data of both ranks."""
    for step in steps:
        data = [torch.full((2, 8), 1.0 + step + peer) for peer in range(2)]
        is_wrapped = isinstance(model, TorchDDP)
        model(data[rank] if is_wrapped else torch.cat(data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def in_memory(
    rank: int, world_size: int, source: str, target: str, options: dict[str, bool]
) -> None:
    model, optimizer = make(source)
    train(model, optimizer, rank, range(3))
    chosen = StateDictOptions(**options)
    # A copy: states of optimizers are not copied when they are loaded.
    of_model, of_optimizer = copy.deepcopy(get_state_dict(model, optimizer, options=chosen))
    if options.get("full_state_dict") and options.get("cpu_offload") and rank > 0:
        assert not of_model  # torch gives them to rank 0 only
    else:
        assert set(of_model) == NAMES
        assert set(of_optimizer["state"]) == NAMES
        assert set(of_model) == set(get_model_state_dict(model, options=chosen))
    other, other_optimizer = make(target, seed=1 + rank * (target == "none"))
    if options.get("broadcast_from_rank0") and rank > 0:
        of_model, of_optimizer = {}, {}
    result = set_model_state_dict(other, of_model, options=chosen)
    assert not result.missing_keys, result
    assert not result.unexpected_keys, result
    set_optimizer_state_dict(other, other_optimizer, of_optimizer, options=chosen)
    check_continues(rank, (model, optimizer), (other, other_optimizer))


def check_continues(rank: int, first: Any, second: Any) -> None:
    for each in (first, second):
        train(*each, rank, range(3, 6))
    for ours, theirs in zip(parameters(first[0]), parameters(second[0]), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"full_state_dict": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
        {"full_state_dict": True, "broadcast_from_rank0": True, "cpu_offload": True},
    ],
    ids=lambda options: "+".join(options) or "default",
)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("ours", "torch's"),
        ("torch's", "ours"),
        ("ours", "ours"),
        ("none", "ours"),
        ("ours", "none"),
    ],
)
def test_in_memory(run_ranks: Any, source: str, target: str, options: dict[str, bool]) -> None:
    run_ranks(in_memory, 2, source, target, options)


def on_disk(rank: int, world_size: int, source: str, target: str, folder: Path) -> None:
    model, optimizer = make(source)
    train(model, optimizer, rank, range(3))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    other, other_optimizer = make(target, seed=1)
    found = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, other_optimizer),
    }
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(other, found["model"], options=StateDictOptions(strict=True))
    set_optimizer_state_dict(other, other_optimizer, found["optimizer"])
    check_continues(rank, (model, optimizer), (other, other_optimizer))


@pytest.mark.parametrize(
    ("source", "target"), [("ours", "torch's"), ("torch's", "ours"), ("none", "ours")]
)
def test_on_disk(run_ranks: Any, tmp_path: Path, source: str, target: str) -> None:
    run_ranks(on_disk, 2, source, target, tmp_path)
