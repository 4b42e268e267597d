"""Choosing between hooks, on simulated networks and with measured steps over loopback."""

import json
import math
import re
from dataclasses import replace

import pytest

from commhooks.costs.backends import Cost, Gloo
from commhooks.costs.network import Link, Network
from commhooks.costs.prediction import DryRuns
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace
from commhooks.lab.simulation import (
    BASELINE,
    BreakEvenRates,
    Study,
    break_even_rates,
    curve_sizes,
)
from commhooks.lab.verdict import fallback_hook, verdict

ALL = Members(1, spans_nodes=True)
SIZES = [1 << power for power in range(1, 18)]


def dry_runs(nbytes: float, local: float = 0.0) -> DryRuns:
    """One bucket after 0.1 s of backward, in an all-reduce of ``nbytes``."""
    collective = Collective("all_reduce", nbytes, ALL)
    bucket = BucketTrace(8_000_000, 0.1, 0.0, (local, 0.0), (collective,))
    step = StepTrace((bucket,), 0.05, is_native=local == 0.0)
    return DryRuns({size: [(1.0, step)] for size in (2, 4, 32)}, 1, confirmed=SIZES)


def study(link: float, size: int = 16, **hooks: DryRuns) -> Study:
    network = Network(size, Link(link, payload_share=1.0), Link(1e12))
    return Study({BASELINE: dry_runs(8e6), **hooks}, network, Gloo(0.0, 0.0, 0.0))


def test_a_hook_is_faster_below_the_rate_at_which_it_ties_with_the_baseline():
    # 15 MB against 7.5 MB and 10 ms: 7.5 MB take 10 ms at 6 Gbit/s.
    found = study(1e9, half=dry_runs(4e6, local=0.010))
    assert found.break_even("half") == BreakEvenRates(0.0, pytest.approx(6e9, rel=0.02))
    assert found.predictions["half"].step_seconds < found.predictions[BASELINE].step_seconds
    faster = study(10e9, half=dry_runs(4e6, local=0.010))
    assert faster.predictions["half"].step_seconds > faster.predictions[BASELINE].step_seconds


def test_a_hook_that_only_costs_is_never_faster_and_one_that_only_saves_always_is():
    assert study(1e9, slow=dry_runs(8e6, local=0.01)).break_even("slow") is None
    assert study(1e9, free=dry_runs(4e6)).break_even("free") == BreakEvenRates(0.0, math.inf)


def test_advice_names_the_fastest_hook_if_it_is_worth_it():
    assert study(1e8, half=dry_runs(4e6)).advice.startswith("Use half, 1.8 times as fast as allred")
    too_little = study(1e11, half=dry_runs(4e6)).advice
    assert too_little.startswith("No hook helps: keep allreduce. With half a step takes 1.00 times")
    assert "name other hooks" in study(1e9).advice
    slower = study(1e9, slow=dry_runs(8e6, local=0.01)).advice
    assert "keep allreduce. With slow a step takes 1.0" in slower


def test_advice_knows_what_small_trainings_lost():
    quick = dry_runs(1e6)
    assert "int8, 7.4 times" in study(1e7, int8=quick).advice
    assert "with a validation loss of +0.6 % at most, in small" in study(1e7, int8=quick).advice
    lossy = study(1e7, int8=dry_runs(2e6), signsgd=quick).advice
    assert lossy.startswith("Use int8, ")
    assert re.search(r"Faster: signsgd, .*\+42\.7 % at most", lossy)
    unknown = study(1e7, int8=dry_runs(2e6), mine=quick).advice
    assert unknown.startswith("Use int8, ")
    assert re.search(r"Faster: mine, .* unknown effect on the loss: train with it\.$", unknown)
    only_lossy = study(1e7, bf16=dry_runs(4e6), signsgd=quick).advice
    assert only_lossy.startswith("No other hook helps: keep bf16, 2.0 times as fast as allreduce.")
    assert study(1e7, noop=quick).advice.startswith("No hook helps")


def test_a_hook_is_worth_it_from_a_speed_up_of_1_1():
    assert verdict({"allreduce": 1.11, "int8": 1.0}, "allreduce").startswith("Use int8, 1.1 times")
    assert verdict({"allreduce": 1.09, "int8": 1.0}, "allreduce").startswith("No hook helps")
    assert fallback_hook({"torch": 1.11, "bf16": 1.0}, "torch") == "bf16"
    assert fallback_hook({"torch": 1.09, "bf16": 1.0}, "torch") == "torch"


def test_a_hook_is_recommended_up_to_a_loss_of_2_percent():
    seconds = {"allreduce": 2.0, "int8": 1.0}
    assert verdict(seconds, "allreduce", {"int8": 1.9}).startswith("Use int8, 2.0 times")
    too_lossy = verdict(seconds, "allreduce", {"int8": 2.1})
    assert too_lossy.startswith("No hook helps: keep allreduce. Faster: int8, 2.0 times")


def test_curves_contain_the_size_of_the_network_and_larger_ones():
    found = study(1e9, size=3000)
    sizes = curve_sizes(found.network)
    assert sizes[0] == 2
    assert sizes[-1] == 3000
    seconds = found.curve(BASELINE, sizes)
    assert seconds == sorted(seconds)  # a longer ring takes longer


def test_kinds_of_steps_are_weighted_by_their_shares():
    sends, rests = dry_runs(8e6).by_size[2][0][1], dry_runs(0.0).by_size[2][0][1]
    mixed = DryRuns({size: [(0.25, sends), (0.75, rests)] for size in SIZES}, 1)
    found = study(1e9, mixed=mixed)
    often, never = found.predictions[BASELINE], study(1e9, never=dry_runs(0.0))
    expected = 0.25 * often.step_seconds + 0.75 * never.predictions["never"].step_seconds
    assert found.predictions["mixed"].step_seconds == pytest.approx(expected)


def test_speed_scales_computation():
    network = Network(2, Link(1e15), Link(1e15))
    gloo = Gloo(0.0, 0.0, 0.0)
    hooks = {BASELINE: dry_runs(8e6)}
    slow = Study(hooks, network, gloo).predictions[BASELINE]
    fast = Study(hooks, network, gloo, speed=10.0).predictions[BASELINE]
    assert fast.step_seconds == pytest.approx(slow.step_seconds / 10, rel=1e-3)


def test_the_number_of_events_does_not_depend_on_the_number_of_ranks():
    events = {
        size: study(1e10, size=size).predictions[BASELINE].events for size in (2, 1000, 100_000)
    }
    assert len(set(events.values())) == 1
    assert events[2] < 20


def test_json_has_all_figures():
    found = json.loads(json.dumps(study(1e9, free=dry_runs(4e6)).to_json()))
    assert found["hooks"]["free"]["break_even"] == {"above": 0.0, "below": None}
    assert found["hooks"][BASELINE]["wire_bytes"] == 15e6
    assert len(found["hooks"]["free"]["curve_seconds"]) == len(found["curve_ranks"])
    assert found["network"]["size"] == 16


def test_curves_have_gaps_where_nothing_is_known():
    small = DryRuns({16: dry_runs(4e6).at(16)}, 1)
    found = study(1e9, small=small)
    assert found.curve("small", [8, 16]) == [None, found.predictions["small"].step_seconds]
    assert found.to_json()["hooks"]["small"]["curve_seconds"].count(None) == 9


def test_a_hook_may_be_faster_above_a_rate_only():
    """Such a hook saves rounds of messages, but sends more bytes."""
    assert break_even_rates(lambda rate: rate > 3e7) == BreakEvenRates(
        pytest.approx(3e7, rel=0.02), math.inf
    )
    between = break_even_rates(lambda rate: 2e6 < rate < 5e11)
    assert between == BreakEvenRates(pytest.approx(2e6, rel=0.02), pytest.approx(5e11, rel=0.02))
    assert str(BreakEvenRates(0.0, math.inf)) == "any rate"
    assert str(BreakEvenRates(2e6, 5e11)) == "above 2 Mbit/s, below 500 Gbit/s"


# ------------------------------------------------------------ with measured steps over loopback

MEASURED = {"torch": 0.25, "half": 0.30, "slow": 0.26}
SENT = {"torch": 8e6, "half": 4e6, "slow": 8e6}


def calibrated(gloo: Gloo | None = None, **seconds: float) -> Study:
    """Two ranks, for which steps over loopback were measured."""
    link = Link(1e9, latency_seconds=20e-6)
    return Study(
        {hook: dry_runs(nbytes) for hook, nbytes in SENT.items()},
        Network(2, link, link),
        gloo or Gloo(0.0, 0.0, 0.0),
        baseline="torch",
        loopback_seconds=MEASURED | seconds,
    )


@pytest.mark.parametrize("hook", ["torch", "half"])
def test_what_a_link_adds_is_added_to_the_measured_step(hook: str) -> None:
    latency = 2 * 20e-6  # a ring of two ranks has two rounds
    on_the_wire = SENT[hook] / Link(1e8).bytes_per_second + latency
    found = calibrated().step_seconds(hook, 1e8)
    assert found == pytest.approx(MEASURED[hook] + on_the_wire)


def test_without_measured_steps_the_simulated_step_counts() -> None:
    found = replace(calibrated(), loopback_seconds=None)
    assert found.step_seconds("half", 1e9) == found.predictions["half"].step_seconds


def test_at_the_break_even_rate_both_are_equal() -> None:
    found = calibrated()
    rates = found.break_even("half")
    assert rates is not None
    assert rates.above == 0
    # 4 MB take the 0.05 s that it costs over loopback.
    assert rates.below == pytest.approx(8 * 4e6 / 0.05 / Link(1.0).payload_share, rel=0.02)
    assert found.step_seconds("half", rates.below) == pytest.approx(
        found.step_seconds("torch", rates.below), rel=0.01
    )


def test_break_even_at_the_ends() -> None:
    assert calibrated(half=0.25 - 1e-6).break_even("half") == BreakEvenRates(0.0, math.inf)
    assert calibrated().break_even("slow") is None  # saves nothing, and takes longer
    assert calibrated(slow=0.25).break_even("slow") is None


def test_a_link_is_never_faster_than_loopback() -> None:
    class Inverted(Gloo):
        def cost(self, collective: Collective, network: Network) -> Cost:
            return Cost(1e-15 * network.link.bits_per_second, 0.0, 0.0)

    found = replace(calibrated(), backend=Inverted(0.0, 0.0, 0.0))
    assert found.step_seconds("half", 1e6) == MEASURED["half"]


def test_the_work_of_cores_on_bytes_is_not_counted_twice() -> None:
    """Bytes take time on cores over any link, and loopback was measured."""
    busy = calibrated(Gloo(0.0, 0.0, 1e-8))
    assert busy.step_seconds("torch", 1e12) == pytest.approx(MEASURED["torch"], abs=1e-3)
    assert busy.step_seconds("torch", 1e9) < calibrated().step_seconds("torch", 1e9)
