"""Schedule: one hook after the other, by step."""

from typing import Any

import pytest
import torch
from support.inner_hooks import Recorder
from support.states import hook_state

import commhooks
from commhooks.algorithms import ErrorFeedback, Schedule
from commhooks.testing.compare import same_bits, through_file
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

PARAMETERS = probe_parameters()


def test_hook_of_a_step() -> None:
    hook: Any = commhooks.create("schedule", stages=[[0, "allreduce"], [3, "fp16"], [9, "bf16"]])
    assert [hook.turn_at(step)[0].name for step in (0, 2, 3, 8, 9, 10**9)] == [
        "allreduce",
        "allreduce",
        "fp16",
        "fp16",
        "bf16",
        "bf16",
    ]
    cyclic: Any = commhooks.create("schedule", stages=[[0, "fp16"], [3, "bf16"]], cycle=5)
    assert [cyclic.turn_at(step)[0].name for step in range(8)] == [
        "fp16",
        "fp16",
        "fp16",
        "bf16",
        "bf16",
        "fp16",
        "fp16",
        "fp16",
    ]


DELAYED = {"name": "skip_nonfinite", "inner": {"name": "diloco", "delay": 1}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": []}, "option 'stages'.*length >= 1"),
        ({"stages": [[1, "fp16"]]}, r"ascend from 0, found \[1\]"),
        ({"stages": [[0, "fp16"], [5, "bf16"], [5, "noop"]]}, r"found \[0, 5, 5\]"),
        ({"stages": [[0, "fp16"], [7, "bf16"], [5, "noop"]]}, r"found \[0, 7, 5\]"),
        ({"stages": [[-1, "fp16"]]}, "it is not >= 0"),
        ({"stages": [[0, "fp16"], [5, "bf16"]], "cycle": 5}, "more steps than 5.*found 5"),
        ({"stages": [[0, "fp16", 3]]}, "option 'stages'"),
        ({"stages": [[0, "local_sgd"], [5, "bf16"]]}, r"differ under Local.*handle\.replace"),
        ({"stages": [[0, "bf16"], [5, "gossip"]], "cycle": 9}, "differ under Gossip.*different"),
        ({"stages": [[0, DELAYED], [5, "gossip"]]}, r"under way when .* handle\.replace"),
        ({"stages": [[0, "gossip"], [5, DELAYED]], "cycle": 9, "keep_state": False}, "under way"),
        ({"stages": "fp16"}, "option 'stages'"),
        ({"stages": [["0", "fp16"]]}, "option 'stages'"),
    ],
)
def test_bad_stages(options: Any, message: str) -> None:
    with pytest.raises(commhooks.CommHookOptionError, match=message):
        commhooks.create("schedule", **options)


def test_stages_after_which_models_differ() -> None:
    commhooks.create("schedule", stages=[[0, "bf16"], [5, "gossip"], [7, "local_sgd"]])
    commhooks.create("schedule", stages=[[0, "local_sgd"], [5, "gossip"]], cycle=9)
    commhooks.create("schedule", stages=[[0, "bf16"], [5, DELAYED]])
    commhooks.create("schedule", stages=[[0, DELAYED], [5, "gossip"]], cycle=9)


def train(trainer: Trainer, rank: int, steps: range) -> list[Any]:
    return [trainer.step(draw_gradients(PARAMETERS, rank, step)) for step in steps]


def switch(rank: int, size: int, stock: bool) -> None:
    hooks = [Recorder(tag=tag) for tag in "abc"]
    schedule = Schedule([(0, hooks[0]), (2, hooks[1]), (5, hooks[2])])
    trainer = Trainer(schedule, PARAMETERS, torch_ddp=stock)
    train(trainer, rank, range(7))
    used = [sorted({call.step for call in hook.calls}) for hook in hooks]
    assert used == [[0, 1], [2, 3, 4], [5, 6]]
    # The state of a hook that will not be used again is cleared.
    assert hook_state(trainer.handle).keys() == {".stages.2.1"}
    assert set(hooks[2].counts().values()) == {2.0}


@pytest.mark.parametrize("stock", [False, True])
def test_switches_between_steps(run_ranks: Any, stock: bool) -> None:
    run_ranks(switch, 2, stock)


def come_back(rank: int, size: int, keep_state: bool) -> None:
    hooks = [Recorder(tag=tag) for tag in "ab"]
    schedule = Schedule([(0, hooks[0]), (2, hooks[1])], cycle=3, keep_state=keep_state)
    trainer = Trainer(schedule, PARAMETERS)
    train(trainer, rank, range(4))  # a a b a
    assert set(hooks[0].counts().values()) == {3.0 if keep_state else 1.0}
    assert set(hooks[1].counts().values()) == ({1.0} if keep_state else set())


@pytest.mark.parametrize("keep_state", [False, True])
def test_state_when_a_cycle_returns_to_a_hook(run_ranks: Any, keep_state: bool) -> None:
    run_ranks(come_back, 2, keep_state)


POWERSGD = {"name": "powersgd", "rank": 2, "start_step": 0, "min_compression_rate": 1.0}


def resume(rank: int, size: int, keep_state: bool) -> None:
    """A run resumed at any step, also at a switch, gives the same bits."""
    config = {
        "name": "schedule",
        "stages": [[0, POWERSGD], [2, "bf16"]],
        "cycle": 3,
        "keep_state": keep_state,
    }
    trainer = Trainer(commhooks.create(config), PARAMETERS, stable_buckets=True)
    saved = []
    results = []
    for step in range(7):
        saved.append(through_file(trainer.handle.state_dict()))
        results += train(trainer, rank, range(step, step + 1))
    for step in range(7):
        resumed = Trainer(commhooks.create(config), PARAMETERS, stable_buckets=True)
        resumed.handle.load_state_dict(saved[step])
        assert same_bits(train(resumed, rank, range(step, 7)), results[step:]), step
        assert same_bits(resumed.handle.state_dict(), trainer.handle.state_dict())


@pytest.mark.parametrize("keep_state", [False, True])
def test_resumes_bit_for_bit(run_ranks: Any, keep_state: bool) -> None:
    run_ranks(resume, 2, keep_state)


def share(rank: int, size: int) -> None:
    """Error feedback around a schedule passes its errors from stage to stage."""
    stages = [(0, Recorder(1.0)), (1, Recorder(2.0)), (2, commhooks.create("allreduce"))]
    hook = ErrorFeedback(Schedule(stages))  # type: ignore[arg-type]
    trainer = Trainer(hook, PARAMETERS)
    train(trainer, rank, range(2))
    assert hook.state["matrix"]["error"].abs().max() > 1.0
    train(trainer, rank, range(2, 3))
    assert not hook.state["matrix"]["error"].any()


def test_error_feedback_around_a_schedule(run_ranks: Any) -> None:
    run_ranks(share, 2)


def count_bytes(rank: int, size: int) -> None:
    hook = commhooks.create("schedule", stages=[[0, "allreduce"], [2, "bf16"]])
    parameters = {"even": torch.zeros(60)}
    trainer = Trainer(hook, parameters)
    for step in range(4):
        trainer.step(draw_gradients(parameters, rank, step))
    assert trainer.handle.stats().left_out == 1  # the first one, after which buckets are rebuilt
    assert trainer.handle.stats().total.wire_bytes == (240 + 2 * 120) / 3


def test_statistics_are_means_over_stages(run_ranks: Any) -> None:
    run_ranks(count_bytes, 2)


def take_turns(rank: int, size: int) -> None:
    hooks = [Recorder(tag=tag) for tag in "abc"]
    schedule = Schedule([(0, hooks[0]), (2, hooks[1]), (3, hooks[2])], cycle=6)
    trainer = Trainer(schedule, {"even": torch.zeros(60)})
    for step in range(14):
        trainer.step(draw_gradients({"even": torch.zeros(60)}, rank, step))
    used = [[call.step for call in hook.calls] for hook in hooks]
    assert used == [[0, 1, 2, 3, 4, 5], [0, 1], [0, 1, 2, 3, 4, 5]]


def test_hooks_of_a_cycle_count_their_own_steps(run_ranks: Any) -> None:
    run_ranks(take_turns, 2)


ONE_SIDED = {**POWERSGD, "rank": 4, "two_sided": False}


def compress_every_other_step(rank: int, size: int) -> None:
    """What one-sided PowerSGD has not sent stays bounded, though it runs in even steps only."""
    parameters = {"matrix": torch.zeros(40, 40)}
    stages = [[0, "allreduce"], [1, ONE_SIDED]]
    trainer = Trainer(commhooks.create("schedule", stages=stages, cycle=2), parameters)
    gradients = draw_gradients(parameters, rank)
    for _ in range(200):
        trainer.step(gradients)
    error = hook_state(trainer.handle)[".stages.1.1"]["matrix"]["error"]
    assert error.norm() < 20 * gradients["matrix"].norm()


def test_what_depends_on_the_parity_of_the_step_goes_on_in_a_cycle(run_ranks: Any) -> None:
    run_ranks(compress_every_other_step, 2)


def meet(rank: int, size: int) -> None:
    """With 4 ranks, the partners of an exponential topology are others in every other step."""
    stages = [[0, "noop"], [1, "push_sum"]]
    trainer = Trainer(commhooks.create("schedule", stages=stages, cycle=2), {"x": torch.zeros(8)})
    with torch.no_grad():
        trainer.parameters["x"].fill_(rank)
    for _ in range(4):
        trainer.step({"x": torch.zeros(8)})
    assert trainer.parameters["x"].tolist() == [1.5] * 8


def test_all_ranks_meet_in_a_cycle(run_ranks: Any) -> None:
    run_ranks(meet, 4)
