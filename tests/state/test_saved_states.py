"""What saved states contain, and what is said about damaged ones."""

import copy
import json
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import of_rank, same_state

import commhooks
from commhooks import algorithms
from commhooks.hook.base import tree
from commhooks.state import HookState
from commhooks.testing.compare import same_bits, through_file
from commhooks.testing.probe import Trainer, draw_gradients

Change = Callable[[dict[str, Any]], Any]


def trained(config: Any, rank: int, steps: int = 2) -> Trainer:
    trainer = Trainer(commhooks.create(config))
    for step in range(steps):
        trainer.step(draw_gradients(trainer.parameters, rank, step))
    return trainer


def without(name: str) -> Change:
    return lambda saved: [
        part.get("matrix", {}).pop(name, None) for part in saved["state"].values()
    ]


def setting(name: str, value: Any) -> Change:
    def change(saved: dict[str, Any]) -> None:
        is_same = name in same_state(saved).get("matrix", {})
        (same_state if is_same else of_rank)(saved).setdefault("matrix", {})[name] = value

    return change


def later_stage(saved: dict[str, Any]) -> None:
    saved["hook"] = saved["hook"].replace("[5,", "[7,")


SCHEDULE = {"name": "schedule", "stages": [[0, "int8"], [5, "topk"]]}
ROUTE = {"name": "route", "rules": [["matrix", "topk"]], "default": "dgc"}
DILOCO = {"name": "diloco", "period": 1}
POWERSGD = {"name": "powersgd", "rank": 2, "start_step": 0, "min_compression_rate": 1.0}
GUARD = {"name": "guard", "inner": "int4", "max_error": 0.01, "every": 1}
REFUSED: list[tuple[Any, Change, str]] = [
    ("topk", without("error"), r"'topk', 'matrix': field 'error': .* shape \(12, 10\), found none"),
    ("dgc", without("velocity"), "'velocity': expected float32 or float64 .* found none"),
    (DILOCO, without("momentum"), "'momentum': .* found none"),
    (POWERSGD, without("right"), r"'right': .* shape \(2, 10\), found none"),
    (POWERSGD, setting("left", torch.ones(12, 2)), "'left': expected only .* 'error', 'right'"),
    (POWERSGD, setting("right", torch.ones(3, 10)), r"shape \(2, 10\), found .* \(3, 10\)"),
    ("int8", setting("error", torch.ones(12, 10).char()), r"found int8 of shape \(12, 10\)"),
    ("int8", setting("error", torch.full((12, 10), torch.inf)), "'error': expected finite"),
    ("int8", setting("error", torch.ones(12, 10).to_sparse()), "expected a dense tensor"),
    ("int8", setting("average_start", torch.tensor(200)), r"expected 0 to \d+, found 200"),
    ("int8", without("average_start"), "'average_start': expected both"),
    ("int8", setting("extra", torch.ones(1)), "'extra': expected only the fields 'error'"),
    ("fp16", lambda saved: of_rank(saved).update(matrix={"e": torch.ones(1)}), "the fields none"),
    ("push_sum", setting("weight", torch.tensor(0.0)), "'weight': expected a positive number"),
    (SCHEDULE, later_stage, r"stages\.1\.0=5, .* saved with stages\.1\.0=7"),
    (
        SCHEDULE,
        lambda saved: saved.update(hook=json.dumps(json.loads(saved["hook"]) | {"stages": []})),
        "has stages=",
    ),
    (
        SCHEDULE,
        lambda saved: of_rank(saved).update({".stages.1.1": of_rank(saved).pop(".stages.0.1")}),
        r"'topk' at '.stages.1.1', .*expected only the fields 'error'",
    ),
    (
        ROUTE,
        lambda saved: of_rank(saved)[".default"].update(of_rank(saved)[".rules.0.1"]),
        "'dgc' at '.default', 'matrix': there is no such parameter",
    ),
    (
        GUARD,
        lambda saved: same_state(saved)[".extra_state"].update(since=torch.ones(1)),
        r"'guard', '.extra_state': expected JSON by name, found .*tensor",
    ),
    (
        GUARD,
        lambda saved: same_state(saved)[".extra_state"].update(since='"now"'),
        "'guard': expected a step, found 'now'",
    ),
    (GUARD, lambda saved: same_state(saved).pop(".extra_state"), "expected 1 tensors .*, found 0"),
    ("int8", lambda saved: saved.update(step=2**70), "a step of at least 0"),
    ("int8", lambda saved: saved.update(version=0), "of version 2, found 0"),
]


def refuse(rank: int, size: int, culprit: int) -> None:
    """Load a state that is damaged on one rank; none of them loads."""
    for config, change, message in REFUSED:
        handle = trained(config, rank).handle
        saved = through_file(handle.state_dict())
        assert_refused = pytest.raises(commhooks.CommHookStateError, match=message)
        damaged = copy.deepcopy(saved)
        if rank == culprit:
            change(damaged)
        with assert_refused as refused:
            handle.load_state_dict(damaged)
        assert f"rank {culprit}" in str(refused.value)
        assert same_bits(handle.state_dict(), saved)


def test_damaged_states_are_refused_on_all_ranks(run_ranks: Any) -> None:
    run_ranks(refuse, 2, 1)


def differ(rank: int, size: int) -> None:
    handle = trained(POWERSGD, rank).handle
    saved = handle.state_dict()
    with pytest.raises(commhooks.CommHookStateError, match=r"the same step .* 2 on rank 0 and 3"):
        handle.load_state_dict(saved | {"step": 2 + rank})
    with pytest.raises(
        commhooks.CommHookStateError, match=r"ranks 0 and 1 do not match: .*'right'"
    ):
        handle.load_state_dict(saved | {"state": {} if rank else saved["state"]})
    assert same_bits(handle.state_dict(), saved)
    guard = trained(GUARD, rank).handle
    saved = guard.state_dict()
    other = copy.deepcopy(saved)
    same_state(other)[".extra_state"]["since"] = str(rank)
    with pytest.raises(commhooks.CommHookStateError, match=r"has 'since' of '.extra_state' as 0"):
        guard.load_state_dict(other)
    assert same_bits(guard.state_dict(), saved)


def test_states_of_different_steps_or_contents_are_refused(run_ranks: Any) -> None:
    run_ranks(differ, 2)


def differ_between_shards(rank: int, size: int) -> None:
    """Both ranks are in a node. The hook of the first one's shard has fallen back."""
    nodes = {"name": "hierarchical", "inner": GUARD, "ranks_per_node": 2}
    handle = trained(nodes, rank).handle
    guard: Any = handle.hook.inner  # type: ignore[union-attr]
    guard.extra_state = {} if rank else {"since": 7}
    saved = through_file(handle.state_dict())
    resumed: Any = trained(nodes, rank, 0).handle
    resumed.load_state_dict(saved)
    assert resumed.hook.inner.is_fallback == (rank == 0)
    assert same_bits(resumed.state_dict(), saved)


def test_shards_of_nodes_may_have_different_states(run_ranks: Any) -> None:
    run_ranks(differ_between_shards, 2)


def begin_with_factors_of_another_bucket(rank: int, size: int) -> None:
    """Nothing in a state tells the shape of a bucket."""
    trainer = trained({"name": "batched_powersgd", "rank": 2, "start_step": 0}, rank)
    saved = trainer.handle.state_dict()
    for entry in same_state(saved).values():
        if "right" in entry:
            entry["right"] = torch.ones(1, 3)
    trainer.handle.load_state_dict(saved)
    found = trainer.step(draw_gradients(trainer.parameters, rank, 2))
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_factors_of_another_bucket_are_dropped(run_ranks: Any) -> None:
    run_ranks(begin_with_factors_of_another_bucket, 2)


def kept_by_dcp(rank: int, size: int, folder: str) -> None:
    """torch.distributed.checkpoint takes equal keys on several ranks for copies of one value."""
    handle = trained("topk", rank).handle
    saved = handle.state_dict()
    cases = {"handle": handle, "state": saved, "later": handle}
    for name, each in cases.items():
        save: Any = dcp.async_save if name == "later" else dcp.save
        writing = save({"hook": each}, checkpoint_id=f"{folder}/{name}")
        if name == "later":
            writing.result()
    for name in cases:
        path = f"{folder}/{name}"
        other = trained("topk", rank, 0).handle
        with pytest.raises(
            commhooks.CommHookStateError, match=r"expected . tensors .*, found 0.*HookState"
        ):
            dcp.load({"hook": other}, checkpoint_id=path)  # fills only what a fresh hook has
        assert same_bits(other.state_dict(), trained("topk", rank, 0).handle.state_dict())
        dcp.load({"hook": HookState(other, path)}, checkpoint_id=path)
        assert same_bits(other.state_dict(), saved)


def test_dcp_keeps_the_state_of_each_rank(run_ranks: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(kept_by_dcp, 2, folder)


@pytest.mark.parametrize("name", sorted(algorithms.HOOKS))
def test_hooks_declare_their_state(name: str) -> None:
    options = {
        "int8": {},
        "guard": {"inner": "int8", "max_error": 0.1},
        "schedule": {"stages": [[0, "int8"]]},
        "route": {"rules": [["*", "int8"]]},
    }
    wraps = name in ("cast", "error_feedback", "hierarchical", "skip_nonfinite")
    hook = commhooks.create(name, **options.get(name, {"inner": "bf16"} if wraps else {}))
    for each in tree(hook):
        assert each.state_fields(torch.zeros(40, 30)) is not None


def change_options(rank: int, size: int) -> None:
    """Options of hooks that have no state are free, as are all before the first state."""
    guard = {"name": "guard", "inner": "bf16", "max_error": 1.0, "every": 1}
    for before, after in [
        ("local_sgd", {"name": "local_sgd", "period": 16}),
        ("bf16", {"name": "bf16", "two_shot": True}),
        (guard, guard | {"max_error": 0.5}),
    ]:
        saved = through_file(trained(before, rank).handle.state_dict())
        resumed = trained(after, rank, steps=0)
        resumed.handle.load_state_dict(saved)
        for step in range(2, 5):
            resumed.step(draw_gradients(resumed.parameters, rank, step))
    # What a guard has decided is a state without tensors.
    saved = through_file(trained(guard | {"max_error": 1e-9}, rank).handle.state_dict())
    with pytest.raises(commhooks.CommHookStateError, match=r"max_error=1.0, but .*1e-09"):
        trained(guard, rank, steps=0).handle.load_state_dict(saved)


def test_options_without_a_state_may_change(run_ranks: Any) -> None:
    run_ranks(change_options, 2)


def change_nodes(rank: int, size: int) -> None:
    """Under diloco nodes may have other sizes; hierarchical has the state of a node's shards."""
    for name in ("diloco", "hierarchical"):
        configs = [{"name": name, "ranks_per_node": n} for n in (1, 2)]
        if name == "hierarchical":
            configs = [config | {"inner": "topk"} for config in configs]
        before, after = ({"name": "skip_nonfinite", "inner": config} for config in configs)
        first = trained(before, rank)
        saved = through_file(first.handle.state_dict())
        resumed = trained(after, rank, steps=0)
        if name == "hierarchical":
            with pytest.raises(commhooks.CommHookStateError, match=r"inner\.ranks_per_node=2, but"):
                resumed.handle.load_state_dict(saved)
            continue
        resumed.handle.load_state_dict(saved)
        assert same_bits(resumed.handle.hook.state_dict(), first.handle.hook.state_dict())
        for step in range(2, 5):
            resumed.step(draw_gradients(resumed.parameters, rank, step))


def test_nodes_may_have_other_sizes(run_ranks: Any) -> None:
    run_ranks(change_nodes, 2)
