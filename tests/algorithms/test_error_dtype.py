"""Errors in bfloat16: what is kept, and that nothing is lost on average."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.lockstep import draw_gradients as draw
from support.lockstep import make_bucket, take_step
from support.simulated_ranks import Group
from torch import Tensor

import commhooks
from commhooks.state.layout import Layout, Source
from commhooks.state.resharding import Resharding
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

HOOKS = {
    "int8": {},
    "onebit": {},
    "topk": {"density": 0.1, "warmup_steps": 0},
    "shared_topk": {"density": 0.1, "warmup_steps": 0},
    "threshold": {"value": 0.5},
    "randomk": {"error_feedback": True},
    "powersgd": {"rank": 2, "start_step": 0},
    "batched_powersgd": {"rank": 2, "start_step": 0},
    "error_feedback": {"inner": "bf16"},
}


def flattened(tensor: Tensor) -> Tensor:
    """Return the numbers as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def trains(rank: int, size: int, name: str) -> dict[str, Tensor]:
    """Return what is missing in the results and errors of some steps, and the last results."""
    options = {"name": name, **HOOKS[name]}
    plain = Trainer(commhooks.create(options), stable_buckets=True)
    small = Trainer(commhooks.create(options | {"error_dtype": "bfloat16"}), stable_buckets=True)
    parameters = probe_parameters()
    totals = {key: torch.zeros_like(value) for key, value in parameters.items()}
    last: dict[str, Tensor] = {}
    for step in range(30):
        gradients = draw_gradients(parameters, step, rank)
        plain.step(gradients)
        last = small.step(gradients)
        for key, result in last.items():
            totals[key] += gradients[key] - result
    state, exact = small.handle.hook.state, plain.handle.hook.state
    for key, entry in state.items():
        if key not in parameters:  # the factors of a bucket
            continue
        assert entry["error"].dtype == torch.bfloat16
        assert 2 * entry["error"].nbytes == exact[key]["error"].nbytes
        flat, error = flattened(totals[key]), entry["error"]
        flat -= flattened(error).float()
        if "average_error" in entry:  # errors of averages count on all ranks
            start, own = int(entry["average_start"]), entry["average_error"]
            flat[start : start + own.numel()] -= size * own
    missing = torch.cat([totals[key].reshape(-1) for key in sorted(totals) if key != "empty"])
    dist.all_reduce(missing)
    return {"missing": missing / size, **last}


@pytest.mark.parametrize("name", HOOKS)
def test_nothing_is_lost_on_average(run_ranks: Any, name: str) -> None:
    found = run_ranks(trains, 2, name)
    assert same_bits(*found)
    missing = found[0]["missing"]
    # Errors of size 1 to 5 are rounded in each step, by at most 1/64; they add up as chance does.
    assert missing.abs().max() > 1e-4  # in float32 nothing would be missing
    assert missing.abs().mean() < 0.05
    assert missing.mean().abs() < 0.01


@pytest.mark.parametrize("name", HOOKS)
def test_other_dtypes_are_refused(name: str) -> None:
    with pytest.raises(commhooks.CommHookOptionError, match=r"error_dtype.*neither bfloat16"):
        commhooks.create(name, error_dtype=torch.float16)


def accumulates(rank: int, size: int) -> float:
    """Return the mean error of gradients of 0.001 that are never sent, after 600 steps."""
    trainer = Trainer(
        commhooks.create("topk", density=0.01, warmup_steps=0, error_dtype="bfloat16"),
        {"weight": torch.zeros(500)},
    )
    gradient = torch.full((500,), 0.001)
    gradient[:5] = 1.0
    for _ in range(600):
        trainer.step({"weight": gradient})
    return float(trainer.handle.hook.state["weight"]["error"][5:].float().mean())


def test_small_gradients_accumulate(run_ranks: Any) -> None:
    """Rounded to nearest, an error above 0.25 would not change by 0.001."""
    for error in run_ranks(accumulates, 2):
        assert error == pytest.approx(0.6, rel=0.05)


def average_many(rank: int, size: int) -> None:
    """The mean of 300 errors in bfloat16, which has 8 bits: a sum in it would stop growing."""
    hook = commhooks.create("topk", error_dtype="bfloat16")
    trainer = Trainer(hook, {"w": torch.zeros(4)})
    old = Layout(300, 1)
    resharding = Resharding(hook, trainer.handle.adapter, old)
    error = {"w": {"error": torch.full((4,), 3.0, dtype=torch.bfloat16)}}
    resharding.add({Source("rank", number, old, 0): error for number in range(300)})
    found = resharding.combine(resharding.described())["w"]["error"]
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [3.0] * 4


def test_the_mean_over_many_ranks(run_ranks: Any) -> None:
    run_ranks(average_many, 1)


def test_errors_of_averages_survive_a_step_that_fails() -> None:
    """In other buckets they move to the errors of parameters, before the first message."""
    hooks = [commhooks.create("int8", error_dtype="bfloat16") for _ in range(2)]
    shapes = {"a": (100,), "b": (90,)}
    for step in range(2):
        take_step(hooks, [draw(shapes, rank, step, torch.float32) for rank in range(2)], step)

    def unsent() -> Tensor:
        total = torch.zeros(190)
        for hook in hooks:
            for name, own in zip("ab", total.split([100, 90]), strict=True):
                entry = hook.state[name]
                own += entry["error"].float()
                if "average_error" in entry:
                    start, error = int(entry["average_start"]), entry["average_error"]
                    own[start : start + len(error)] += 2 * error
        return total

    before = unsent()
    for rank, hook in enumerate(hooks):
        gradients = draw(shapes, rank, 2, torch.float32)
        bucket = make_bucket({name: gradients[name] for name in "ba"}, 2)  # other parts
        comm = commhooks.Communicator(Group(rank, 2), step=2, key=bucket.key)  # type: ignore[arg-type]
        run: Any = hook.reduce(bucket, comm)
        run.send(None)
        with pytest.raises(ValueError, match="lost"):
            run.throw(ValueError("lost"))
    torch.testing.assert_close(unsent(), before, rtol=0, atol=2**-7 * before.abs().max().item())


@pytest.mark.parametrize("name", ["int8", "topk", "threshold", "powersgd"])
def test_hooks_without_errors_round_none(name: str) -> None:
    """So a graph can capture them, where that is possible at all."""
    plain, small = (
        commhooks.create(name, **HOOKS[name] | {"error_feedback": False}, **options)
        for options in ({}, {"error_dtype": "bfloat16"})
    )
    assert small.capturable_from == plain.capturable_from
    assert commhooks.create(name, **HOOKS[name], error_dtype="bfloat16").capturable_from is None
