import json
import math

import pytest

from commhooks.costs.step_trace import BucketScript, Collective, Members, StepScript
from commhooks.lab.simulation import (
    BASELINE,
    Gloo,
    Link,
    Network,
    PayingRates,
    Rehearsals,
    Study,
    paying_rates,
)

ALL = Members(1, spans_nodes=True)
SIZES = (2, 4, 32)


def rehearsals(nbytes: float, local: float = 0.0) -> Rehearsals:
    collective = Collective("all_reduce", nbytes, ALL)
    bucket = BucketScript(8_000_000, 0.1, 0.0, (local, 0.0), (collective,))
    step = StepScript((bucket,), 0.05, is_native=local == 0.0)
    return Rehearsals({size: [(1.0, step)] for size in SIZES}, 1)


def study(link: float, size: int = 16, **hooks: Rehearsals) -> Study:
    network = Network(size, Link(link, payload_share=1.0), Link(1e12))
    return Study({BASELINE: rehearsals(8e6), **hooks}, network, Gloo(0.0, 0.0, 0.0))


def test_a_hook_pays_below_the_rate_where_it_ties_with_the_plain_average():
    # 15 MB against 7.5 MB and 10 ms: 7.5 MB take 10 ms at 6 Gbit/s.
    found = study(1e9, half=rehearsals(4e6, local=0.010))
    assert found.pays("half") == PayingRates(0.0, pytest.approx(6e9, rel=0.02))
    assert found.predictions["half"].step_seconds < found.predictions[BASELINE].step_seconds
    faster = study(10e9, half=rehearsals(4e6, local=0.010))
    assert faster.predictions["half"].step_seconds > faster.predictions[BASELINE].step_seconds


def test_a_hook_that_only_costs_never_pays_and_one_that_only_saves_always_does():
    assert study(1e9, slow=rehearsals(8e6, local=0.01)).pays("slow") is None
    assert study(1e9, free=rehearsals(4e6)).pays("free") == PayingRates(0.0, math.inf)


def test_advice_names_the_fastest_where_it_is_worth_it():
    assert study(1e8, half=rehearsals(4e6)).advice.startswith("Take half: among 16 ranks")
    assert "1.0" in study(1e11, half=rehearsals(4e6)).advice
    assert study(1e11, half=rehearsals(4e6)).advice.startswith("Stay with allreduce")
    assert "name other hooks" in study(1e9).advice
    assert "none of these is faster" in study(1e9, slow=rehearsals(8e6, local=0.01)).advice


def test_curves_go_beyond_the_network_and_through_it():
    found = study(1e9, size=3000)
    sizes = found.curve_sizes()
    assert sizes[0] == 2
    assert sizes[-1] == 3000
    seconds = found.curve(BASELINE, sizes)
    assert seconds == sorted(seconds)  # a ring only gets longer


def test_shares_of_kinds_of_steps_are_weighed():
    sends, rests = rehearsals(8e6).by_size[2][0][1], rehearsals(0.0).by_size[2][0][1]
    mixed = Rehearsals({size: [(0.25, sends), (0.75, rests)] for size in SIZES}, 1)
    found = study(1e9, mixed=mixed)
    often, never = found.predictions[BASELINE], study(1e9, never=rehearsals(0.0))
    expected = 0.25 * often.step_seconds + 0.75 * never.predictions["never"].step_seconds
    assert found.predictions["mixed"].step_seconds == pytest.approx(expected)


def test_faster_ranks_compute_faster():
    network = Network(2, Link(1e15), Link(1e15))
    gloo = Gloo(0.0, 0.0, 0.0)
    hooks = {BASELINE: rehearsals(8e6)}
    slow = Study(hooks, network, gloo).predictions[BASELINE]
    fast = Study(hooks, network, gloo, speed=10.0).predictions[BASELINE]
    assert fast.step_seconds == pytest.approx(slow.step_seconds / 10, rel=1e-3)


def test_a_hundred_thousand_ranks_are_as_many_events_as_two():
    events = {
        size: study(1e10, size=size).predictions[BASELINE].events for size in (2, 1000, 100_000)
    }
    assert len(set(events.values())) == 1
    assert events[2] < 20


def test_json_has_all_that_is_known():
    found = json.loads(json.dumps(study(1e9, free=rehearsals(4e6)).to_json()))
    assert found["hooks"]["free"]["pays"] == {"above": 0.0, "below": None}
    assert found["hooks"][BASELINE]["wire_bytes"] == 15e6
    assert len(found["hooks"]["free"]["curve_seconds"]) == len(found["curve_ranks"])
    assert found["network"]["size"] == 16


def test_a_hook_may_pay_above_a_rate_only():
    """Where it saves rounds of messages, but sends more bytes."""
    assert paying_rates(lambda rate: rate > 3e7) == PayingRates(
        pytest.approx(3e7, rel=0.02), math.inf
    )
    between = paying_rates(lambda rate: 2e6 < rate < 5e11)
    assert between == PayingRates(pytest.approx(2e6, rel=0.02), pytest.approx(5e11, rel=0.02))
    assert str(PayingRates(0.0, math.inf)) == "at any rate"
    assert str(PayingRates(2e6, 5e11)) == "above 2 Mbit/s, below 500 Gbit/s"
