"""Auto and guard in torch.distributed.checkpoint, loaded on the same and on other ranks."""

import copy
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from algorithms.adaptive.test_auto import PARAMETERS, Links, agree, train
from support.states import hook_state, same_state
from torch import Tensor

import commhooks
from commhooks.state import HookState
from commhooks.testing.compare import same_bits, through_file
from commhooks.testing.probe import Trainer, draw_gradients

CONFIGS: dict[str, dict[str, Any]] = {
    "auto": {"name": "auto", "error": 0.3, "candidates": ["int8", "int4"]},
    "guard": {"name": "guard", "inner": "int4", "max_error": 0.01, "every": 2},
}


def trained(name: str, rank: int, steps: int) -> Trainer:
    trainer = Trainer(commhooks.create(CONFIGS[name]), PARAMETERS, bucket_cap_mb=0.02)
    train(trainer, rank, range(steps))
    return trainer


def unsent(hook: Any, size: int) -> dict[str, Tensor]:
    """What this rank has yet to send of each parameter."""
    hook._table.begin_step()
    found = {name: hook._table.residual(size, name, p) for name, p in PARAMETERS.items()}
    return {name: it.double() for name, it in found.items() if it is not None}


def save(rank: int, size: int, folder: str) -> dict[str, Any]:
    with ExitStack() as stack:
        Links(stack)
        auto, guard = trained("auto", rank, 30), trained("guard", rank, 3)
        for name, trainer in (("auto", auto), ("guard", guard)):
            dcp.save({"hook": HookState(trainer.handle)}, checkpoint_id=f"{folder}/{name}")
        hook: Any = auto.handle.hook
        found = {
            "plan": agree(hook).to_json(),
            "history": list(hook.history),
            "unsent": unsent(hook, size),
            "since": hook_state(guard.handle),
        }
        # The same ranks go on with the same bits while the plan is the same one.
        again = trained("auto", rank, 0)
        path = f"{folder}/auto"
        dcp.load({"hook": HookState(again.handle, path)}, checkpoint_id=path)
        assert same_bits(hook_state(again.handle), hook_state(auto.handle))
        for step in range(31, 36):
            gradients = draw_gradients(PARAMETERS, rank, step)
            assert same_bits(again.step(gradients), auto.step(gradients)), step
        assert again.handle.hook.history == found["history"]  # type: ignore[union-attr]
    return found


def load(rank: int, size: int, folder: str) -> dict[str, Any]:
    with ExitStack() as stack:
        Links(stack)
        auto, guard = trained("auto", rank, 0), trained("guard", rank, 0)
        for name, trainer in (("auto", auto), ("guard", guard)):
            path = f"{folder}/{name}"
            dcp.load({"hook": HookState(trainer.handle, path)}, checkpoint_id=path)
        hook: Any = auto.handle.hook
        inner: Any = guard.handle.hook
        found = {
            "plan": hook.plan.to_json(),
            "history": list(hook.history),
            "unsent": unsent(hook, size),
            "is_fallback": inner.is_fallback,
        }
        for trainer in (auto, guard):
            train(trainer, rank, range(30, 50))
        if size > 1:
            agree(hook)
    return found


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_other_ranks_go_on_with_the_same_plan(run_ranks: Any, ranks: int, tmp_path: Path) -> None:
    saved = run_ranks(save, 2, str(tmp_path))
    assert {row["hook"] for row in saved[0]["plan"]["rows"]} > {"allreduce"}
    for loaded in run_ranks(load, ranks, str(tmp_path)):
        assert loaded["is_fallback"]
        if ranks == 1:  # nothing is sent
            assert "there is one rank" in json.dumps(loaded["plan"])
            continue
        assert loaded["plan"] == saved[0]["plan"]
        assert loaded["history"] == saved[0]["history"]
        for name, value in loaded["unsent"].items():
            mean = sum(each["unsent"][name] for each in saved) / 2
            torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-6)


DAMAGES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("plan", lambda plan: 3, "the saved plan of hook 'auto': .*plan"),
    ("plan", lambda plan: plan | {"rows": "none"}, "the saved plan of hook 'auto': .*rows"),
    (
        "plan",
        lambda plan: plan | {"rows": [{}]},
        "the saved plan of hook 'auto': .* missing ",
    ),
    (
        "plan",
        lambda plan: plan | {"rows": [row | {"hook": "int5"} for row in plan["rows"]]},
        "the saved plan of hook 'auto': 'int5'",
    ),
    ("history", lambda history: [*history, "later"], "the saved plan of hook 'auto': .*history"),
    ("metrics", lambda metrics: {"plans": "many"}, "the saved plan of hook 'auto': .*metrics"),
]


def load_damaged(rank: int, size: int) -> None:
    """The state is damaged on rank 1; rank 0 does not load it either."""
    with ExitStack() as stack:
        Links(stack)
        trainer = trained("auto", rank, 30)
        handle = trainer.handle
        hook: Any = handle.hook
        plan = hook.plan
        saved = through_file(handle.state_dict())
        for key, change, message in DAMAGES:
            damaged = copy.deepcopy(saved)
            if rank == 1:
                extra = same_state(damaged)[".extra_state"]
                extra[key] = json.dumps(change(json.loads(extra[key])))
            with pytest.raises(commhooks.CommHookStateError, match=message) as refused:
                handle.load_state_dict(damaged)
            assert "rank 1" in str(refused.value)
            assert same_bits(handle.state_dict(), saved), key
            assert hook.plan == plan
        train(trainer, rank, range(30, 33))
        agree(hook)


def test_damaged_plans_are_refused_on_all_ranks(run_ranks: Any) -> None:
    run_ranks(load_damaged, 2)
