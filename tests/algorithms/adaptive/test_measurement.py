"""What a rank measures in a step, and when."""

import time
from contextlib import ExitStack
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from algorithms.adaptive.test_auto import CANDIDATES, PARAMETERS, Links, agree, agreed_of, train
from torch import Tensor

import commhooks
from commhooks.algorithms.adaptive import link, measurement
from commhooks.algorithms.adaptive.link import Probe
from commhooks.algorithms.adaptive.measurement import Measurement
from commhooks.algorithms.adaptive.planner import AgreedState, Planner
from commhooks.algorithms.wrappers.table import HookTable, residual_of
from commhooks.algorithms.wrappers.timing import HOST
from commhooks.algorithms.wrappers.trial import Trial, relative_error, squares_of
from commhooks.hook.base import tree
from commhooks.hook.spec import hook_spec
from commhooks.testing.probe import Trainer, draw_gradients

TOPK = "topk:density=0.05,warmup_steps=0"


def probe(rank: int, size: int) -> list[tuple[int, bool]]:
    """Return the steps that probe, and whether that follows the last bucket."""
    found: list[tuple[int, bool]] = []

    async def note(*arguments: Any) -> Any:
        of = hook._measuring
        last = max(group.bucket for group in of._planner.groups)
        found.append((of._step, len(of._buckets) == last + 1 > 1))
        time.sleep(1.0)
        return await link.probe(*arguments)

    with ExitStack() as stack:
        Links(stack)
        stack.enter_context(patch.object(measurement, "probe", note))
        decide = stack.enter_context(patch.object(Planner, "decide", autospec=True))
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        train(trainer, rank, range(6))
        decide.side_effect = lambda _planner, _reports, agreed, _step: agreed
        train(trainer, rank, range(6, agreed_of(hook).report + 2))
        reports = decide.call_args.args[1] if rank == 0 else []  # which decides
        assert len(reports) == (0 if rank else size)
        for report in reports:
            assert isinstance(report.probe, Probe)
            assert report.step.buckets
            assert report.step.forward_seconds < 0.9  # without the probe
    return found


def test_the_link_is_probed_once_when_backward_has_ended(run_ranks: Any) -> None:
    """Before, backward may hold the cores that the messages need."""
    for found in run_ranks(probe, 2):
        ((_, is_after_all),) = found
        assert is_after_all


def try_topk(rank: int, size: int) -> None:
    """Compare the errors of trials with those of the same hook, in training for the same steps."""
    with ExitStack() as stack:
        Links(stack)
        stack.enter_context(patch.object(measurement, "_CHECKED_IN_TRIALS", 1 << 20))
        stack.enter_context(patch.object(measurement, "_LEAST_SAMPLE", 1 << 20))
        hook: Any = commhooks.create("auto", error=0.3, candidates=[TOPK])
        trainer = Trainer(hook, PARAMETERS)
        step = 0
        while not hook._measuring._reads or not agreed_of(hook).trials:
            trainer.step(draw_gradients(PARAMETERS, rank, step))
            step += 1
        agreed = agreed_of(hook)
        steps = [draw_gradients(PARAMETERS, rank, i) for i in range(agreed.start, agreed.report)]
        assert len(steps) > 4
        for (group, spec), outcome in hook._measuring.report().outcomes.items():
            if spec == "allreduce":
                continue
            names = hook._measuring._planner.groups[group].names
            alone: Any = hook_spec(TOPK).create()
            alone_on = Trainer(alone, {name: PARAMETERS[name] for name in names})
            for gradients in steps:
                p = {name: gradients[name].clone() for name in names}
                for name in names:
                    rest = residual_of(alone, name, p[name], size)
                    p[name] += 0 if rest is None else rest.view(p[name].shape)
                average = alone_on.step({name: gradients[name] for name in names})
            exact = torch.cat([p[name].view(-1) for name in names])
            dist.all_reduce(exact.div_(size))
            found = torch.cat([average[name].view(-1) for name in names])
            error = relative_error(*squares_of(found, exact).tolist())
            assert outcome.error == pytest.approx(error, rel=1e-3)


def test_trials_have_what_was_not_sent_in_the_steps_before(run_ranks: Any) -> None:
    """So errors are those of a hook in use, which grow with its residual."""
    run_ranks(try_topk, 2)


def overlap(rank: int, size: int) -> float:
    """Return the share of measuring in steps with trials whose buckets wait for each other."""
    average = Trial.average

    async def slow_average(*arguments: Any) -> Tensor:
        time.sleep(0.02)
        return await average(*arguments)

    with ExitStack() as stack:
        Links(stack)
        stack.enter_context(patch.object(Trial, "average", slow_average))
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        step = 0
        while not ((agreed := agreed_of(hook)) and agreed.is_trial(step)):
            train(trainer, rank, range(step, step + 1))
            step += 1
        hook._measuring._spent_ns, hook._measuring._first_ns = 0, time.monotonic_ns()
        train(trainer, rank, range(step, step + 3))
        return trainer.handle.stats().metrics["planning_share"]


def test_time_in_which_several_buckets_are_measured_counts_once(run_ranks: Any) -> None:
    for share in run_ranks(overlap, 2):
        assert 0.1 < share < 1


def fail_in_trials(rank: int, size: int) -> None:
    """Rank 0 fails when rank 1 has begun with a trial; then both repeat the step."""
    average = Trial.average

    async def average_and_fail(*arguments: Any) -> Tensor:
        await average(*arguments)
        raise ValueError("by the test")

    with ExitStack() as stack:
        Links(stack)
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, PARAMETERS)
        step = 0
        while not ((agreed := agreed_of(hook)) and agreed.is_trial(step)):
            train(trainer, rank, range(step, step + 1))
            step += 1
        train(trainer, rank, range(step, step + 2))
        trials = [each for it in hook._measuring.trials.values() for each in tree(it._hook)]
        assert any(each.state for each in trials)
        for _ in range(2):
            with (
                patch.object(Trial, "average", average_and_fail if rank == 0 else average),
                pytest.raises(commhooks.CommHookError, match="by the test"),
            ):
                train(trainer, rank, range(step + 2, step + 3))
        for repeated in range(step + 2, step + 16):
            train(trainer, rank, range(repeated, repeated + 1))
            if hook.history:
                break
        assert set(agree(hook).hook_of().values()) > {"allreduce"}
        assert not any(each.state for each in trials)  # nor memory, until the next ones


def test_ranks_repeat_trials_alike(run_ranks: Any) -> None:
    """Or they would wait for each other's collectives."""
    run_ranks(fail_in_trials, 2)


def drop_a_bucket(rank: int, size: int) -> None:
    """One bucket of a timed step is not finite, so `auto` does not get it."""
    with ExitStack() as stack:
        Links(stack)
        options = {"error": 0.3, "candidates": CANDIDATES}
        hook: Any = commhooks.create("skip_nonfinite", inner={"name": "auto", **options})
        trainer, step = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02), 0
        while not (agreed := agreed_of(hook.inner)):
            train(trainer, rank, range(step, step + 1))
            step += 1
        assert len(hook.inner._measuring._planned) > 1
        train(trainer, rank, range(step, agreed.start + 1))
        gradients = draw_gradients(PARAMETERS, rank, agreed.start + 1)
        gradients["a"].fill_(torch.nan)
        trainer.step(gradients)
        assert hook.last_step_was_skipped
        train(trainer, rank, range(agreed.start + 2, agreed.start + 20))
        assert set(agree(hook.inner).hook_of().values()) > {"allreduce"}


def test_a_timed_step_without_some_of_the_buckets_is_left_out(run_ranks: Any) -> None:
    run_ranks(drop_a_bucket, 2)


@pytest.mark.parametrize(("buckets", "gaps"), [([3, 2, 3, 1], [0.0, 0.02, 0.02]), ([2] * 4, [])])
def test_times_are_those_of_steps_with_all_buckets(buckets: list[int], gaps: list[float]) -> None:
    own: Any = Measurement(lambda _: cast("Any", None), {}, HookTable([], {}), HOST, AgreedState())
    own._planned, own.agreed = [([], 4)] * 3, AgreedState(start=5)
    for step, count in enumerate(buckets, 5):
        milliseconds = 1 + 9 * (step == 5) + 29 * (step == 7)
        own._launches[step] = [10**6 * (1000 * step + milliseconds * i) for i in range(count)]
        own._ends[step] = own._launches[step][-1]
    found = [bucket.backward_seconds for bucket in own.report().step.buckets]
    assert found == pytest.approx(gaps)
