"""What a rank measures in a step, and when."""

import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from algorithms.adaptive.test_auto import CANDIDATES, PARAMETERS, Links, agree, train
from algorithms.adaptive.test_timing import event_at
from torch import Tensor

import commhooks
from commhooks.algorithms.adaptive.control import Candidates, Controller
from commhooks.algorithms.adaptive.groups import group_parameters
from commhooks.algorithms.adaptive.measurement import Measurement
from commhooks.algorithms.adaptive.table import HookTable
from commhooks.algorithms.adaptive.timing import StreamTimes
from commhooks.algorithms.adaptive.trial import ExactAverage, Outcome
from commhooks.comm.communicator import Communicator
from commhooks.testing.probe import Trainer
from reducer import GradBucket


def probe(rank: int, size: int) -> None:
    is_last: dict[str, bool] = {}
    probed: list[str] = []
    around = Measurement.around

    async def watch(of: Measurement, run: Any, bucket: GradBucket, comm: Communicator) -> Tensor:
        is_last[bucket.key] = bucket.is_last()
        return await around(of, run, bucket, comm)

    async def note(_: Measurement, elements: int, device: object, comm: Communicator) -> None:
        probed.append(comm._key)

    with ExitStack() as stack:
        Links(stack)
        stack.enter_context(patch.object(Controller, "probe_elements", lambda *_: 8))
        stack.enter_context(patch.object(Measurement, "around", watch))
        stack.enter_context(patch.object(Measurement, "_probe", note))
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        train(trainer, rank, range(6))
        assert len(hook._control.layout.buckets) > 1
        assert len(probed) == 6
        assert all(is_last[key] for key in probed)


def test_the_link_is_probed_when_backward_has_ended(run_ranks: Any) -> None:
    """Before, backward may hold the cores that the messages need."""
    run_ranks(probe, 2)


def probe_slowly(rank: int, size: int) -> list[float]:
    async def sleep(*_: object) -> None:
        time.sleep(0.4)

    with ExitStack() as stack:
        Links(stack)
        stack.enter_context(patch.object(Controller, "probe_elements", lambda *_: 8))
        stack.enter_context(patch.object(Measurement, "_probe", sleep))
        hook: Any = commhooks.create("auto", error=0.3, candidates=["int8"])
        trainer = Trainer(hook, PARAMETERS)
        train(trainer, rank, range(5))
        return list(hook._control.window.forwards)


def test_what_is_measured_after_backward_is_not_part_of_the_next_forward(run_ranks: Any) -> None:
    for forwards in run_ranks(probe_slowly, 2):
        assert len(forwards) >= 2
        assert min(forwards) < 0.3


def first_probe(rank: int, size: int, width: int) -> list[float]:
    parameters = {"a": torch.zeros(width, 1024), "b": torch.zeros(width, 1024)}
    probed: list[tuple[int, int]] = []
    in_process = Measurement._probe

    async def note(of: Measurement, elements: int, device: Any, comm: Communicator) -> None:
        probed.append((of._watch._step, elements))
        await in_process(of, elements, device, comm)

    with patch.object(Measurement, "_probe", note):
        hook: Any = commhooks.create("auto", error=0.3, candidates=["int8"])
        trainer = Trainer(hook, parameters, bucket_cap_mb=4 * width * 1024 / 2**20)
        for _ in range(8):
            trainer.step({name: torch.randn_like(p) for name, p in parameters.items()})
            if hook._control.schedule and probed:
                break
        ((step, elements),) = probed
        assert hook._control.schedule.probes(step)
        assert elements == 2 * width * 1024 // 8
        return hook._control.window.byte_cpu_seconds


def test_the_first_probe_measures_what_cores_do_for_a_byte(run_ranks: Any) -> None:
    """But not with small messages, whose costs are not those of bytes."""
    assert run_ranks(first_probe, 2, 64) == [[], []]
    for found in run_ranks(first_probe, 2, 2 * 1024):
        (seconds,) = found
        assert 1e-11 < seconds < 1e-7


def first_trials(rank: int, size: int) -> list[int]:
    runs: list[int] = []
    note_trial = Measurement._note_trial

    def note(of: Measurement, exact: ExactAverage, outcome: Outcome) -> None:
        runs.append(len(outcome.runs))
        note_trial(of, exact, outcome)

    with ExitStack() as stack:
        Links(stack)
        stack.enter_context(patch.object(Measurement, "_note_trial", note))
        hook: Any = commhooks.create("auto", error=0.3, candidates=["int8"])
        train(Trainer(hook, PARAMETERS), rank, range(20))
    return runs


def test_the_first_trial_of_a_hook_runs_twice(run_ranks: Any) -> None:
    """The first run takes longer than later ones. ``int8`` has nothing to learn."""
    for runs in run_ranks(first_trials, 2):
        assert runs[0] == 2
        assert set(runs[1:]) == {1}


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
        train(trainer, rank, range(2))
        with (
            patch.object(ExactAverage, "of", average_and_fail if rank == 0 else of),
            pytest.raises(commhooks.CommHookError, match="by the test"),
        ):
            train(trainer, rank, range(2, 3))
        assert hook._control.are_first_trials(2)
        train(trainer, rank, range(2, 12))
        assert set(agree(hook).hook_of().values()) > {"allreduce"}


def test_ranks_repeat_their_first_trials_alike(run_ranks: Any) -> None:
    """Or they would wait for each other's collectives."""
    run_ranks(fail_in_the_first_trials, 2)


def test_a_new_layout_forgets_what_a_device_has_yet_to_tell() -> None:
    """On the host, these times are known and forgotten before."""
    control = Controller(
        Candidates(("allreduce", "int4"), (True, False), (1,), 0.3),
        replan=50,
        backend="gloo",
        size=2,
    )
    parameters = {"w": torch.zeros(8)}
    times = StreamTimes(torch.device("cpu"))
    measurement = Measurement(
        control,
        {},
        HookTable([], {}),
        8,
        lambda buckets: group_parameters(buckets, parameters, (), {}),
        times,
    )
    bucket = GradBucket(torch.zeros(8), [parameters["w"]], ["w"])
    for step in range(3):
        launched = event_at(1_000_000 * (1 + step))
        measurement.begin_step(step, launched)
        measurement._watch.bucket(bucket, launched, control.window)
    assert control.layout is not None
    times.settle(wait=True)
    assert control.window.steps == []
    measurement.begin_step(3, event_at(6_000_000))
    times.settle(wait=True)
    assert control.window.steps == [pytest.approx(0.003)]
