"""The state of a hook, saved and loaded through its handle."""

import copy
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.states import hook_state, of_rank
from test_handle import Scaled, backward, both_wrappers, make_model

import commhooks
from commhooks.testing.compare import through_file


def resume(rank: int, size: int, torch_ddp: bool) -> None:
    model = make_model(torch_ddp)
    handle = commhooks.register(model, Scaled())
    for _ in range(3):
        backward(model, rank)
    saved = through_file(handle.state_dict())
    assert saved["step"] == 3
    assert saved["state"].keys() == {f"rank {rank} of 2x1", "shard 0 of 2x1"}
    backward(model, rank)

    other = make_model(torch_ddp)
    handle = commhooks.register(other, Scaled())
    handle.load_state_dict(saved)
    backward(other, rank)
    state = handle.state_dict()
    assert state["step"] == 4
    assert torch.equal(of_rank(state)["0.weight"]["count"], torch.full((5, 6), 4.0))


@both_wrappers
def test_state_is_resumed(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(resume, 2, torch_ddp)


def changed(saved: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Change the fields of a saved state; "rank" is the part of the rank."""
    if "rank" in changes:
        (source, *_) = saved["state"]
        changes["state"] = {source: changes.pop("rank")}
    return copy.deepcopy(saved) | changes


def refuse_state(rank: int, size: int) -> None:
    model = make_model(False)
    hook = Scaled()
    handle = commhooks.register(model, hook)
    backward(model, rank)
    saved = handle.state_dict()
    state, config = of_rank(saved), json.loads(saved["hook"])
    count = {"count": torch.ones(5, 6)}
    bad: list[tuple[Any, str]] = [
        (None, "expected what state_dict"),
        (state, "expected 'version' of type int"),
        (changed(saved, version=3), "version 2, found 3: it was saved by a later version"),
        (changed(saved, step=-1), "step of at least 0"),
        (
            changed(saved, hook=json.dumps({"name": "powersgd"})),
            "expected the state of hook 'test_scaled'",
        ),
        (
            changed(saved, hook=json.dumps(config | {"factor": 2.0})),
            "factor=1.0, .* saved with factor=2.0",
        ),
        (
            changed(saved, state={f"rank {1 - rank} of 2x1": state}),
            f"of rank {rank} of 2x1, found that of rank {1 - rank} of 2x1",
        ),
        (
            changed(saved, state={f"rank {rank} of 3x1": state}),
            "of rank . of 3x1, found that|on 3x1 .* on 2x1, because the hook does not declare",
        ),
        (changed(saved, state={"0": state}), "expected keys such as 'rank . of 2x1'.*found '0'"),
        (
            changed(saved, state=saved["state"] | {"rank 0 of 3x1": {}}),
            "expected a state of one set of ranks, found those of .x1, .x1",
        ),
        (
            changed(saved, rank={}),
            "expected 6 tensors in the state of rank . of 2x1, found 0.*HookState",
        ),
        (changed(saved, rank=state | {"9.weight": count}), "'9.weight': there is no such"),
        (changed(saved, rank=state | {"0.weight": 3}), "'0.weight': expected tensors by name"),
        (changed(saved, rank=state | {"0.weight": {"count": 3}}), "'count': expected a tensor"),
        (
            changed(saved, rank=state | {"0.weight": {"count": torch.ones(6)}}),
            r"'count': expected float32 of shape \(5, 6\), found float32 of shape \(6\)",
        ),
        (
            changed(saved, rank=state | {"0.weight": {"count": torch.ones(5, 6).half()}}),
            r"'count': expected float32 of shape \(5, 6\), found float16",
        ),
    ]
    for value, message in bad:
        with pytest.raises(commhooks.CommHookStateError, match=message):
            handle.load_state_dict(value)
        after = handle.state_dict()
        assert after["step"] == saved["step"]
        for name, tensors in of_rank(after).items():
            assert torch.equal(tensors["count"], state[name]["count"])
    # Without a state there is nothing that options, rank or world size could spoil.
    handle.load_state_dict(changed(saved, hook=json.dumps(config | {"factor": 2.0}), state={}))
    assert hook_state(handle) == {}


def test_states_of_others_and_damaged_states(run_ranks: Any) -> None:
    run_ranks(refuse_state, 2)


@dataclass
class Picky(Scaled):
    """Notices only while loading that a state is of no use."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if any((tensors["count"] < 0).any() for tensors in state.values()):
            raise ValueError("negative")


def load_halfway(rank: int, size: int) -> None:
    model = make_model(False)
    handle = commhooks.register(model, Picky())
    backward(model, rank)
    saved = handle.state_dict()
    damaged = copy.deepcopy(saved)
    of_rank(damaged)["0.bias"]["count"].neg_()
    with pytest.raises(commhooks.CommHookStateError, match="cannot use the saved state: negative"):
        handle.load_state_dict(damaged)
    assert torch.equal(hook_state(handle)["0.bias"]["count"], torch.ones(5))


def test_a_hook_that_refuses_a_state_keeps_its_own(run_ranks: Any) -> None:
    run_ranks(load_halfway, 2)
