"""Non-finite gradients are dropped on all ranks, and all ranks are informed."""

from typing import Any

import pytest
import torch
from support.inner_hooks import Recorder
from support.states import hook_state

import commhooks
from commhooks.algorithms import ErrorFeedback, Route, SkipNonfinite
from commhooks.hook.base import tree
from commhooks.testing.compare import same_bits, through_file
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

PARAMETERS = probe_parameters()
# The parameter that becomes non-finite, in one of the several buckets.
BAD = "matrix"


def draw(rank: int, step: int, culprit: int | None = None, number: float = torch.inf) -> Any:
    gradients = draw_gradients(PARAMETERS, rank, step)
    if rank == culprit:
        gradients[BAD][2, 3] = number
    return gradients


def drop(rank: int, size: int, stock: bool) -> None:
    inner = Recorder()
    hook = SkipNonfinite(inner)
    options: Any = {"bucket_cap_mb": 0.0001} if stock else {"stable_buckets": True}
    trainer = Trainer(hook, PARAMETERS, torch_ddp=stock, **options)
    trainer.step(draw(rank, 0))
    trainer.step(draw(rank, 1))
    assert not hook.last_step_was_skipped
    for culprit in range(size):
        calls = len(inner.calls)
        number = (torch.inf, -torch.inf, torch.nan)[culprit]
        found = trainer.step(draw(rank, 2, culprit, number))
        assert hook.last_step_was_skipped
        assert not found[BAD].any()
        # Other buckets, if there are any, are averaged as usual.
        seen = {name for call in inner.calls[calls:] for name in call.names}
        assert BAD not in seen
        reduced = {name for name, gradient in found.items() if gradient.any()}
        assert reduced == {name for name in seen if PARAMETERS[name].numel()}
        stats = trainer.handle.stats().metrics
        assert stats == {
            "skipped_steps": culprit + 1.0,
            "skipped_buckets": culprit + 1.0,
            "last_step_was_skipped": 1.0,
        }
        found = trainer.step(draw(rank, 3))
        assert found[BAD].any()
        assert trainer.handle.stats().metrics["last_step_was_skipped"] == 0.0


@pytest.mark.parametrize("stock", [False, True])
def test_each_rank_in_turn(run_ranks: Any, stock: bool) -> None:
    run_ranks(drop, 3, stock)


def test_alone(run_ranks: Any) -> None:
    run_ranks(drop, 1, False)


def count_buckets(rank: int, size: int) -> None:
    hook = SkipNonfinite(Recorder())
    trainer = Trainer(hook, PARAMETERS)
    trainer.step(draw(rank, 0))
    gradients = draw(rank, 1)
    for gradient in gradients.values():
        gradient[...] = torch.nan
    found = trainer.step(gradients)
    assert all(not gradient.any() for gradient in found.values())
    buckets = [bucket for bucket in trainer.handle.stats().buckets if bucket.gradient_bytes > 0]
    assert len(buckets) > 2
    assert hook.metrics()["skipped_steps"] == 1
    assert hook.metrics()["skipped_buckets"] == len(buckets)


def test_steps_and_buckets_are_counted(run_ranks: Any) -> None:
    run_ranks(count_buckets, 2)


def overflow(rank: int, size: int) -> None:
    """Finite gradients become infinite in float16."""
    hook = commhooks.create("skip_nonfinite", inner="fp16")
    trainer = Trainer(hook, PARAMETERS)
    found = trainer.step(draw(rank, 0, 1, 1e9))
    assert not found[BAD].any()
    assert hook.metrics()["skipped_steps"] == 1


def test_non_finite_results(run_ranks: Any) -> None:
    run_ranks(overflow, 2)


def restore(rank: int, size: int, whole_steps: bool) -> None:
    inner = ErrorFeedback(Recorder(threshold=1.0))
    hook = SkipNonfinite(inner, whole_steps)
    trainer = Trainer(hook, PARAMETERS, stable_buckets=True)
    trainer.step(draw(rank, 0))
    before = through_file(inner.state_dict())
    trainer.step(draw(rank, 1, 1))
    assert hook.last_step_was_skipped
    after = hook_state(trainer.handle)[".inner"]
    assert same_bits(after[BAD], before[BAD])
    assert same_bits(after, before) == whole_steps

    # The next step continues from there, bit for bit, whether or not the state was read.
    found = [trainer.step(draw(rank, 2))]
    unseen = Trainer(commhooks.create(hook.to_config()), PARAMETERS, stable_buckets=True)
    for step, culprit in [(0, None), (1, 1), (2, None)]:
        last = unseen.step(draw(rank, step, culprit))
    found.append(last)
    clean = Trainer(commhooks.create(hook.to_config()), PARAMETERS, stable_buckets=True)
    for step in (0, 2):
        last = clean.step(draw(rank, step))
    found.append(last)
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2]) == whole_steps


@pytest.mark.parametrize("whole_steps", [False, True])
def test_state_of_the_inner_hook(run_ranks: Any, whole_steps: bool) -> None:
    run_ranks(restore, 2, whole_steps)


def fail(rank: int, size: int) -> None:
    """A failed step does not count as skipped."""
    hook = SkipNonfinite(ErrorFeedback(Recorder(threshold=1.0)), whole_steps=True)
    trainer = Trainer(hook, PARAMETERS)
    trainer.step(draw(rank, 0))
    reduce = hook.inner.reduce

    async def failing(*_: object) -> Any:
        raise ValueError("no luck")

    hook.inner.reduce = failing if rank == 0 else reduce  # type: ignore[method-assign]
    with pytest.raises(commhooks.CommHookError, match="no luck"):
        trainer.step(draw(rank, 1))
    hook.inner.reduce = reduce  # type: ignore[method-assign]
    assert trainer.step(draw(rank, 2))[BAD].isfinite().all()
    assert hook.metrics()["skipped_steps"] == 0


def test_recovers_from_a_failure(run_ranks: Any) -> None:
    run_ranks(fail, 2)


def drop_within_route(rank: int, size: int, stock: bool) -> None:
    """Put NaN into each bucket in turn, in the first step and later."""
    names = ("a0", "b0", "a1", "b1", "a2")
    ones = {name: torch.ones(3) for name in names}
    options: Any = {} if stock else {"stable_buckets": True}
    for bad in names:
        recorders = {"a": Recorder(tag="a"), "b": Recorder(tag="b")}
        innermost = SkipNonfinite(recorders["b"])
        hook = SkipNonfinite(Route([("a*", recorders["a"])], default=innermost))
        trainer = Trainer(hook, ones, torch_ddp=stock, bucket_cap_mb=1e-6, **options)
        last: dict[str, str] = {}
        for step in range(4):
            gradients = {name: tensor.clone() for name, tensor in ones.items()}
            if step in (0, 2) and rank == 0:
                gradients[bad][0] = torch.nan
            found = trainer.step(gradients)
            assert hook.last_step_was_skipped == (step in (0, 2))
            assert not innermost.last_step_was_skipped
            kept = {name for name, gradient in found.items() if gradient.eq(1).all()}
            assert step == 0 or set(names) - kept == ({bad} if step == 2 else set())
            for letter, recorder in recorders.items():
                calls = [call for call in recorder.calls if call.step == step]
                seen = [name for call in calls for name in call.names]
                assert set(seen) == {name for name in kept if name.startswith(letter)}
                assert [call.index for call in calls] == list(range(len(calls)))
                if step == 1:
                    last[letter] = seen[-1]
                if step > 0:
                    marked = [name for name, call in zip(seen, calls, strict=True) if call.is_last]
                    assert marked == [last[letter]][: last[letter] in kept]
        assert hook.metrics()["skipped_steps"] == 2


@pytest.mark.parametrize("stock", [False, True])
def test_hooks_of_a_route_do_not_count_dropped_buckets(run_ranks: Any, stock: bool) -> None:
    run_ranks(drop_within_route, 2, stock)


def count_bytes(rank: int, size: int) -> None:
    parameters = {"even": torch.zeros(60)}
    trainer = Trainer(commhooks.create("skip_nonfinite", inner="bf16"), parameters)
    trainer.step(draw_gradients(parameters, rank, 0))
    assert trainer.handle.stats().total.wire_bytes == 4 + 120
    gradients = draw_gradients(parameters, rank, 0)
    gradients["even"][7] = torch.nan
    trainer.step(gradients)
    assert trainer.handle.stats().left_out == 1  # the first step, after which buckets are rebuilt
    assert trainer.handle.stats().total.wire_bytes == 4


@pytest.mark.parametrize("options", [{"delay": 1}])
def test_whole_steps_around_exchanges(options: dict[str, Any]) -> None:
    inner = {"name": "diloco", **options}
    without = SkipNonfinite(inner=commhooks.create("diloco"))
    assert not any(each.has_exchanges for each in tree(without))
    around = commhooks.create("skip_nonfinite", inner=inner)
    assert any(each.has_exchanges for each in tree(around))
    with pytest.raises(commhooks.CommHookOptionError, match=r"'whole_steps'.*DiLoCo.*exchanges"):
        commhooks.create("skip_nonfinite", inner=inner, whole_steps=True)


@pytest.mark.parametrize("inner", ["diloco", "local_sgd", "push_sum"])
def test_whole_steps_around_changed_parameters(inner: str) -> None:
    """Parameters that have moved would stay where they are, and count again in the next period."""
    with pytest.raises(commhooks.CommHookOptionError, match=r"'whole_steps'.*changes parameters"):
        commhooks.create("skip_nonfinite", inner=inner, whole_steps=True)


def test_wire(run_ranks: Any) -> None:
    run_ranks(count_bytes, 2)
