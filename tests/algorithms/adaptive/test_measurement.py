"""What a rank measures in a step, and when."""

import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from algorithms.adaptive.test_auto import CANDIDATES, PARAMETERS, Links, agree, train

import commhooks
from commhooks.algorithms.adaptive import measurement
from commhooks.algorithms.adaptive.measurement import Measurement
from commhooks.algorithms.adaptive.messages import Probe
from commhooks.algorithms.wrappers.trial import ExactAverage, Outcome, Trial
from commhooks.testing.probe import Trainer


def probe(rank: int, size: int) -> list[tuple[int, bool]]:
    """Return the steps that probe, and whether that follows the last bucket."""
    found: list[tuple[int, bool]] = []
    in_process = Measurement._measure_link

    async def note(of: Measurement, elements: int, device: Any, comm: Any) -> Any:
        layout = of.control.layout
        assert layout is not None
        found.append((of._step, len(of._buckets) == len(layout.buckets) > 1))
        time.sleep(0.4)
        return await in_process(of, elements, device, comm)

    with ExitStack() as stack:
        Links(stack)
        stack.enter_context(patch.object(Measurement, "_measure_link", note))
        take = stack.enter_context(patch.object(measurement.Controller, "take", autospec=True))
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        train(trainer, rank, range(6))
        agenda = hook._control.agenda
        train(trainer, rank, range(6, agenda.report + 2))
        (_, reports), _ = take.call_args
        for report in reports:
            assert isinstance(report.probe, Probe)
            assert report.forward_seconds < 0.3  # without the probe
    return found


def test_the_link_is_probed_once_when_backward_has_ended(run_ranks: Any) -> None:
    """Before, backward may hold the cores that the messages need."""
    for found in run_ranks(probe, 2):
        ((_, is_after_all),) = found
        assert is_after_all


def first_trials(rank: int, size: int) -> list[bool]:
    twice: list[bool] = []
    run = Trial.run

    async def note(of: Trial, *arguments: Any, **options: Any) -> Outcome:
        twice.append(options["twice"])
        return await run(of, *arguments, **options)

    with ExitStack() as stack:
        Links(stack)
        stack.enter_context(patch.object(Trial, "run", note))
        hook: Any = commhooks.create("auto", error=0.3, candidates=["int8"], replan=20)
        train(Trainer(hook, PARAMETERS), rank, range(60))
    return twice


def test_the_first_trial_of_a_hook_runs_twice(run_ranks: Any) -> None:
    """The first run takes longer than later ones. ``int8`` has nothing to learn."""
    for twice in run_ranks(first_trials, 2):
        assert twice[0]
        assert len(twice) > 1
        assert not any(twice[1:])


def fail_in_the_first_trials(rank: int, size: int) -> None:
    """Rank 0 fails when rank 1 has begun with its first trial; then both repeat the step."""
    of = ExactAverage.of

    async def average_and_fail(*arguments: Any) -> ExactAverage:
        await of(*arguments)
        raise ValueError("by the test")

    with ExitStack() as stack:
        Links(stack)
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, PARAMETERS)
        step = 0
        while not (hook._control.agenda and hook._control.agenda.trial(step) is not None):
            train(trainer, rank, range(step, step + 1))
            step += 1
            if hook._measuring._received:  # instructions that the next step follows
                break
        for _ in range(2):
            with (
                patch.object(ExactAverage, "of", average_and_fail if rank == 0 else of),
                pytest.raises(commhooks.CommHookError, match="by the test"),
            ):
                train(trainer, rank, range(step, step + 1))
        train(trainer, rank, range(step, step + 12))
        assert set(agree(hook).hook_of().values()) > {"allreduce"}


def test_ranks_repeat_their_first_trials_alike(run_ranks: Any) -> None:
    """Or they would wait for each other's collectives."""
    run_ranks(fail_in_the_first_trials, 2)
