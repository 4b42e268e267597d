"""The reducer against torch's: backward of two models, both gradient modes, 2 ranks over loopback.

Wrappers are measured in turn, round by round, so that other load on the machine affects all of
them. pytest-benchmark's columns show ours; `extra_info` has the others and the ratios.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import steps
from bench.conftest import median_of
from commhooks.cluster import Ranks

ROUNDS = 9
WARM_UP = 3
MODELS = ("transformer-151MB", "2000x256")
MODES = {"copy": False, "view": True}
# How gradients are cleared between steps. None is torch's default; with zeros, views stay views.
CLEARING = {"to none": True, "to zero": False}


def measure_in_turn(
    benchmark: Any, ranks: Ranks, subject: str, others: list[str], set_to_none: bool
) -> dict[str, float]:
    """Return the median seconds of a backward on the slowest rank, for each wrapper."""
    seconds: dict[str, list[float]] = {name: [] for name in [subject, *others]}

    def others_first() -> None:
        for name in others:
            seconds[name].append(max(ranks(steps.backward, name, set_to_none)))

    def run_subject() -> None:
        seconds[subject].append(max(ranks(steps.backward, subject, set_to_none)))

    benchmark.pedantic(
        run_subject, setup=others_first, rounds=ROUNDS, warmup_rounds=WARM_UP, iterations=1
    )
    return {name: median_of(values, WARM_UP) for name, values in seconds.items()}


@pytest.mark.benchmark(group="reducer: averaging")
@pytest.mark.parametrize("clearing", CLEARING)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_averaging(benchmark: Any, two_ranks: Ranks, model: str, mode: str, clearing: str) -> None:
    """Measure plain averaging; the aim is at most 0.95 of torch's time."""
    options = {"gradient_as_bucket_view": MODES[mode]}
    gradient_bytes = two_ranks(steps.prepare, model, ["torch", "ours"], options)[0]
    set_to_none = CLEARING[clearing]
    for name in ("torch", "ours"):
        two_ranks(steps.backward, name, set_to_none)
    assert max(two_ranks(steps.largest_difference, "ours", "torch")) == 0.0
    median = measure_in_turn(benchmark, two_ranks, "ours", ["torch"], set_to_none)
    benchmark.extra_info.update(
        gradient_bytes=gradient_bytes,
        seconds=median,
        ratio_to_torch=median["ours"] / median["torch"],
        aim=0.95,
    )


@pytest.mark.benchmark(group="reducer: what the engine adds")
@pytest.mark.parametrize("clearing", CLEARING)
@pytest.mark.parametrize("subject", ["ours noop", "ours noop, copying"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_added_to_backward(
    benchmark: Any, two_ranks: Ranks, model: str, mode: str, subject: str, clearing: str
) -> None:
    """Measure a hook that sends nothing, which shows the work of the engine alone.

    "noop" tells the engine that nothing changes, so nothing is packed. "noop, copying" is torch's
    own hook function on our engine, which packs and unpacks everything as torch does.
    """
    options = {"gradient_as_bucket_view": MODES[mode]}
    others = ["bare", "torch noop"]
    gradient_bytes = two_ranks(steps.prepare, model, [*others, subject], options)[0]
    set_to_none = CLEARING[clearing]
    for name in [*others, subject]:
        two_ranks(steps.backward, name, set_to_none)
    assert max(two_ranks(steps.largest_difference, subject, "bare")) == 0.0
    median = measure_in_turn(benchmark, two_ranks, subject, others, set_to_none)
    added = median[subject] - median["bare"]
    torch_added = median["torch noop"] - median["bare"]
    benchmark.extra_info.update(
        gradient_bytes=gradient_bytes,
        seconds=median,
        added_seconds=added,
        added_to_bare=added / median["bare"],
        added_to_torch_added=added / torch_added,
        aim="copy: at most 0.5 of what torch adds; view: at most 0.05 of the bare backward",
    )
