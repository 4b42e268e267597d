"""What a rank measures in a step, and when."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from algorithms.adaptive.test_auto import CANDIDATES, PARAMETERS, Links, train
from torch import Tensor

import commhooks
from commhooks.algorithms.adaptive.control import Controller
from commhooks.algorithms.adaptive.measurement import Measurement
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
