"""Links that are not there: the simulation's figures, tied to what was measured."""

import dataclasses
import math

import pytest

from commhooks.costs.step_trace import BucketScript, Collective, Members, StepScript
from commhooks.lab.comparison.entry import BARE, TORCH, Contender
from commhooks.lab.comparison.prediction import Predictor
from commhooks.lab.simulation import Gloo, Link, Measurements, PayingRates, Rehearsals, Subject

MB = 1e6
HALF = Contender("half", {"name": "bf16"})
SLOW = Contender("slow", {"name": "fp16"})
MEASURED = {"bare": 0.15, "torch": 0.25, "half": 0.30, "slow": 0.26}


def rehearsals(nbytes: float) -> Rehearsals:
    """One bucket after 0.1 s of backward, in an all-reduce of so many bytes."""
    collective = Collective("all_reduce", nbytes, Members(1, spans_nodes=True))
    bucket = BucketScript(int(8 * MB), 0.1, 0.0, (0.0, 0.0), (collective,))
    return Rehearsals({2: [(1.0, StepScript((bucket,), 0.05, is_native=True))]}, 1)


def predictor(**seconds: float) -> Predictor:
    found = {
        '{"name": "allreduce"}': rehearsals(8 * MB),
        '{"name": "bf16"}': rehearsals(4 * MB),
        '{"name": "fp16"}': rehearsals(8 * MB),
    }
    measurements = Measurements("this one", Subject("a:model"), Gloo(0.0, 0.0, 0.0), found)
    return Predictor(measurements, 2, MEASURED | seconds)


def on_the_wire(nbytes: float, rate: float) -> float:
    latency = 2 * 20e-6  # a ring of two ranks has two rounds
    return nbytes / Link(rate).bytes_per_second + latency


@pytest.mark.parametrize(("who", "nbytes"), [(TORCH, 8 * MB), (HALF, 4 * MB)])
def test_what_a_link_adds_is_added_to_what_was_measured(who: Contender, nbytes: float) -> None:
    found = predictor().step_seconds(who, 1e9)
    assert found == pytest.approx(MEASURED[who.name] + on_the_wire(nbytes, 1e9))


def test_a_link_adds_nothing_to_a_model_alone() -> None:
    assert predictor().step_seconds(BARE, 1e6) == MEASURED["bare"]


def test_at_the_break_even_rate_both_are_equal() -> None:
    found = predictor()
    pays = found.pays(HALF)
    assert pays is not None
    assert pays.above == 0
    rate = pays.below
    # 4 MB take the 0.05 s that it costs over loopback.
    assert rate == pytest.approx(8 * 4 * MB / 0.05 / Link(1.0).payload_share, rel=0.02)
    assert found.step_seconds(HALF, rate) == pytest.approx(
        found.step_seconds(TORCH, rate), rel=0.01
    )


def test_break_even_at_the_ends() -> None:
    assert predictor(half=0.25 - 1e-6).pays(HALF) == PayingRates(0.0, math.inf)
    assert predictor().pays(SLOW) is None  # saves nothing, and takes longer
    assert predictor(slow=0.25).pays(SLOW) is None


def test_what_bytes_cost_the_cores_is_not_counted_twice() -> None:
    """Bytes cost the cores something over any link, loopback included: that was measured."""
    gloo = Gloo(0.0, 0.0, 1e-8)
    busy = predictor()
    busy = dataclasses.replace(busy, measurements=dataclasses.replace(busy.measurements, gloo=gloo))
    fast = 1e12
    assert busy.step_seconds(TORCH, fast) == pytest.approx(MEASURED["torch"], abs=1e-3)
    assert busy.step_seconds(TORCH, 1e9) < predictor().step_seconds(TORCH, 1e9)
