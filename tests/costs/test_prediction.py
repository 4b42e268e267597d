"""Predictions of steps with exchanges that take several steps."""

import json
from dataclasses import replace

import pytest

from commhooks.costs.dry_runs import DryRuns
from commhooks.costs.nccl import NCCL
from commhooks.costs.network import Link, Network
from commhooks.costs.prediction import Prediction, predict
from commhooks.costs.step_trace import BucketTrace, Collective, ExchangeTrace, Members, StepTrace

EVERYONE = Members(1, spans_nodes=True)
SLOW = Link(8e5, payload_share=1.0)  # 1 MB takes 10 s


def predicted(size: int, *exchanges: ExchangeTrace) -> Prediction:
    """Of training in which every fourth step begins exchanges, and nothing else is sent."""
    quiet = StepTrace((BucketTrace(0, 0.1, 0.0, (0.0,), ()),), 0.1, is_native=False)
    busy = replace(quiet, buckets=(replace(quiet.buckets[0], exchanges=exchanges),))
    kinds = [(0.75, quiet), (0.25, busy)]
    runs = DryRuns(dict.fromkeys((2, 4, 8), kinds), 1)
    runs = DryRuns.from_json(json.loads(json.dumps(runs.to_json())))
    return predict(runs, Network(size, SLOW, SLOW), NCCL())


def all_reduce(steps: int) -> ExchangeTrace:
    return ExchangeTrace(steps, (0.0, 0.0), (Collective("all_reduce", 1e6, EVERYONE),))


def test_what_an_exchange_takes_longer_than_its_delay_is_waited_for() -> None:
    assert predicted(2).step_seconds == pytest.approx(0.2)
    found = predicted(2, all_reduce(steps=3))
    waited = (10 - 3 * 0.2) / 4
    assert found.exposed_seconds == pytest.approx(waited, rel=1e-3)
    assert found.step_seconds == pytest.approx(0.2 + waited, rel=1e-3)
    assert found.wire_bytes == 1e6 / 4


def test_an_exchange_that_is_over_in_time_costs_nothing() -> None:
    assert predicted(2, all_reduce(steps=51)).exposed_seconds == 0.0


def test_exchanges_are_extrapolated_to_more_ranks() -> None:
    found = predicted(16, all_reduce(steps=3))
    assert found.wire_bytes == pytest.approx(2 * 15 / 16 * 1e6 / 4)
    assert found.exposed_seconds > (10 - 3 * 0.2) / 4
