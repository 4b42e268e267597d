"""Guard: a hook is used as long as its error stays within a bound, on all ranks alike."""

import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.algorithms import Guard
from commhooks.algorithms.wrappers import guard
from commhooks.algorithms.wrappers.trial import draw_sample
from commhooks.testing.compare import differences, disagreement, mean_over_ranks, through_file
from commhooks.testing.probe import Trainer, draw_gradients

PARAMETERS = {"a": torch.zeros(40, 30), "b": torch.zeros(30, 20), "c": torch.zeros(7)}
LOW_RANK = {"name": "powersgd", "rank": 2, "start_step": 0}


def gradients(rank: int, step: int, *, low_rank: bool) -> dict[str, Tensor]:
    drawn = draw_gradients(PARAMETERS, rank, step)
    if low_rank:  # the same factor on all ranks, so that the average has rank 1 as well
        drawn = {n: g.flatten()[0] * torch.ones_like(g) for n, g in drawn.items()}
    return drawn


def fall_back(rank: int, size: int) -> None:
    """Gradients have rank 1, then full rank, then rank 1 again."""
    hook = Guard(LOW_RANK, max_error=0.1, every=2, cooldown=6)  # type: ignore[arg-type]
    trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.003)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commhooks").addHandler(handler)
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in PARAMETERS.items()}
    seen = []
    for step in range(40):
        of_ranks = [gradients(peer, step, low_rank=not 8 <= step < 16) for peer in range(size)]
        found = trainer.step(of_ranks[rank])
        assert not disagreement(found)
        seen.append(hook.is_fallback)
        exact = mean_over_ranks(of_ranks, PARAMETERS)
        for name in PARAMETERS:
            sums[name] += found[name].double() - exact[name].double()
        if step == 14:
            assert hook.is_fallback
            saved = through_file(trainer.handle.state_dict())
            resumed = Guard(LOW_RANK, max_error=0.1, every=2, cooldown=6)  # type: ignore[arg-type]
            Trainer(resumed, PARAMETERS, bucket_cap_mb=0.003).handle.load_state_dict(saved)
            assert resumed.is_fallback
            assert set(resumed._table.table.values()) == {1}
        if step == 15:
            assert not differences(found, exact, size)  # the fallback is exact
            # What the inner hook had not sent has been sent: nothing is lost.
            assert all(total.norm() < 1e-4 for total in sums.values())
    logging.getLogger("commhooks").removeHandler(handler)
    assert not any(seen[:9])
    assert all(seen[13:16])
    assert not seen[-1]  # the inner hook is used again
    assert "exceeds 0.1; use allreduce" in records[0]
    assert "is within 0.1; use powersgd" in records[1]
    metrics = trainer.handle.stats().metrics
    assert metrics["fallbacks"] == 1
    assert metrics["is_fallback"] == 0
    assert metrics["last_error"] <= 0.1


def test_it_falls_back_and_returns(run_ranks: Any) -> None:
    run_ranks(fall_back, 2)


def switch_without_numbers(rank: int, size: int) -> None:
    """In the step of the switch, step 5, a gradient of one rank is not finite."""
    hook = Guard(LOW_RANK, max_error=0.1, every=4)  # type: ignore[arg-type]
    trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.003)
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in PARAMETERS.items()}
    for step in range(8):
        of_ranks = [gradients(peer, step, low_rank=step < 4) for peer in range(size)]
        if step == 5:
            of_ranks[0] = {n: torch.full_like(g, torch.nan) for n, g in of_ranks[0].items()}
        found = trainer.step(of_ranks[rank])
        assert hook.is_fallback == (step >= 5)
        if step == 5:
            assert all(average.isnan().all() for average in found.values())
        else:
            exact = mean_over_ranks(of_ranks, PARAMETERS)
            for name in PARAMETERS:
                sums[name] += found[name].double() - exact[name].double()
        errors = [e["error"] for e in hook.inner.state.values() if "error" in e]
        assert len(errors) == (2 if step < 7 else 0)  # the host learns that one step later
        if step >= 6:  # a checkpoint would have nothing that was sent
            assert not any(error.any() for error in errors)
            assert all(total.norm() < 1e-4 for total in sums.values())
        elif step >= 4:
            assert all(error.any() for error in errors)
            assert any(total.norm() > 1 for total in sums.values())


def test_what_was_not_sent_waits_for_a_step_with_numbers(run_ranks: Any) -> None:
    run_ranks(switch_without_numbers, 2)


async def fail(*_: object) -> Tensor:
    raise ValueError("by the test")


def never_return(rank: int, size: int) -> None:
    hook = Guard("int4", max_error=0.01, every=1)  # type: ignore[arg-type]
    trainer = Trainer(hook, PARAMETERS)
    reduce = hook.reduce
    for step in range(12):
        if step == 1:  # it fails before one of the ranks has looked at what was measured
            hook.reduce = fail if rank else reduce  # type: ignore[method-assign]
            with pytest.raises(commhooks.CommHookError):
                trainer.step(draw_gradients(PARAMETERS, rank, step))
            hook.reduce = reduce  # type: ignore[method-assign]
        found = trainer.step(draw_gradients(PARAMETERS, rank, step))
        assert not disagreement(found)
    assert hook.is_fallback
    trainer.handle.hook.recover()  # type: ignore[union-attr]
    assert hook.is_fallback
    small = Guard("int8", max_error=0.05, every=1)  # type: ignore[arg-type]
    trainer = Trainer(small, PARAMETERS)
    for step in range(6):
        trainer.step(draw_gradients(PARAMETERS, rank, step))
    assert not small.is_fallback
    assert 0 < small.metrics()["last_error"] < 0.05


def test_without_a_cooldown_it_stays(run_ranks: Any) -> None:
    run_ranks(never_return, 2)


def sample_all(rank: int, size: int) -> None:
    """Two buckets of two parameters, each as large as a sample."""
    parameters = {name: torch.zeros(40, 30) for name in "abcd"}
    trainer = Trainer(Guard("int8", max_error=0.5, every=1), parameters, bucket_cap_mb=0.009)  # type: ignore[arg-type]
    with (
        patch.object(guard, "_MOST_SAMPLE", 1200),
        patch.object(guard, "draw_sample", side_effect=draw_sample) as draw,
    ):
        for step in range(9):
            trainer.step(draw_gradients(parameters, rank, step))
    buckets = {tuple(call.args[0].names) for call in draw.call_args_list[4:]}
    assert sorted(map(len, buckets)) == [2, 2]
    turns = [(call.args[0].names, call.kwargs["turn"]) for call in draw.call_args_list[4:8]]
    assert {names[turn % 2] for names, turn in turns} == {*"abcd"}


def test_every_parameter_has_its_turn(run_ranks: Any) -> None:
    run_ranks(sample_all, 2)


@pytest.mark.parametrize("option", ["inner", "fallback"])
def test_hooks_that_cannot_be_guarded(option: str) -> None:
    options = {"inner": "int8", "max_error": 0.1, option: "local_sgd"}
    with pytest.raises(commhooks.CommHookError, match=rf"'{option}'.*not return the same"):
        commhooks.create("guard", **options)


SKIPS: dict[str, Any] = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
INT2 = {"name": "guard", "inner": "int2", "max_error": 0.01, "every": 1}


def guard_in(rank: int, size: int, outer: dict[str, Any], path: str, steps: int) -> None:
    hook: Any = commhooks.create(outer)
    trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.003)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    for step in range(steps):
        gradients = draw_gradients(PARAMETERS, rank, step)
        trainer.step({n: g * (n == "b") for n, g in gradients.items()})
        optimizer.step()
    assert hook.nested()[path].is_fallback
    assert hook.nested()[path].metrics()["last_error"] > 0.01


@pytest.mark.parametrize(
    ("outer", "path"),
    [
        ({"name": "schedule", "stages": [[0, INT2], [1, "allreduce"]], "cycle": 2}, "stages.0.1"),
        ({"name": "diloco", "period": 2, "fragments": 2, "inner": INT2}, "inner"),
    ],
)
def test_it_guards_a_hook_that_does_not_run_in_every_step(
    run_ranks: Any, outer: dict[str, Any], path: str
) -> None:
    """In fragments too: those of a round have one number, and only the first one has errors."""
    run_ranks(guard_in, 2, outer, path, 4)


def leave_out(rank: int, size: int) -> None:
    rules = [["a", INT2], ["*", "allreduce"]]
    hook: Any = commhooks.create("route", rules=rules)
    trainer = Trainer(hook, PARAMETERS, **SKIPS)
    for step in range(4):
        gradients = draw_gradients(PARAMETERS, rank, step)
        if step % 2:
            del gradients["a"]
        trainer.step(gradients)
    assert hook.nested()["rules.0.1"].is_fallback


def test_it_guards_parameters_that_every_other_step_leaves_out(run_ranks: Any) -> None:
    run_ranks(leave_out, 2)


def fail_and_leave_out(rank: int, size: int) -> None:
    """Only rank 0 looks at what was measured, in a step that is repeated without the guard."""
    hook: Any = commhooks.create("route", rules=[["a", INT2], ["*", "allreduce"]])
    trainer = Trainer(hook, PARAMETERS, **SKIPS)
    guard = hook.nested()["rules.0.1"]
    reduce = guard.reduce
    for step in range(4):
        gradients = draw_gradients(PARAMETERS, rank, step)
        if step == 1:
            guard.reduce = fail if rank else reduce
            with pytest.raises(commhooks.CommHookError):
                trainer.step(gradients)
            assert guard.is_fallback == (rank == 0)
            guard.reduce = reduce
            del gradients["a"]
        assert not disagreement(trainer.step(gradients))
    assert guard.is_fallback
    assert set(guard._table.table.values()) == {1}
    assert guard.metrics()["fallbacks"] == 1


def test_ranks_agree_after_a_failed_step(run_ranks: Any) -> None:
    run_ranks(fail_and_leave_out, 2)
