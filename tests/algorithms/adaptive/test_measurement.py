"""What a rank measures in a step, and when."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from algorithms.adaptive.test_auto import CANDIDATES, PARAMETERS, Links, train
from algorithms.adaptive.test_timing import event_at
from torch import Tensor

import commhooks
from commhooks.algorithms.adaptive.control import Candidates, Controller
from commhooks.algorithms.adaptive.groups import group_parameters
from commhooks.algorithms.adaptive.measurement import Measurement
from commhooks.algorithms.adaptive.table import HookTable
from commhooks.algorithms.adaptive.timing import StreamTimes
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
