"""What `auto` derives from measurements, without processes."""

import json
import math
import random
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.algorithms.adaptive import check
from commhooks.algorithms.adaptive.control import Candidates, Controller
from commhooks.algorithms.adaptive.fit import Cost, Point, fit
from commhooks.algorithms.adaptive.groups import (
    ParameterGroup,
    group_parameters,
    with_wire_bytes,
)
from commhooks.algorithms.adaptive.knowledge import Knowledge
from commhooks.algorithms.adaptive.link import LinkTimes, backend_of, fit_link
from commhooks.algorithms.adaptive.observation import Observation, Observed, observe
from commhooks.algorithms.adaptive.report import Agreed, Stage, TrialRecord
from commhooks.algorithms.adaptive.sample import draw_sample
from commhooks.algorithms.adaptive.schedule import Schedule
from commhooks.algorithms.adaptive.situation import Situation
from commhooks.algorithms.exact.allreduce import AllReduce
from commhooks.hook.derived_bucket import bucket_with
from reducer import GradBucket

# ---------------------------------------------------------------------------------------- fits


def test_a_fit_finds_both_costs_in_spite_of_outliers() -> None:
    sizes = [(2.0, 1e3), (2.0, 1e5), (1.0, 1e6), (2.0, 1e7)]
    points = [Point(u, b, 1e-4 * u + 1e-8 * b) for u, b in sizes]
    late = [Point(2.0, 1e5, 0.5)]
    cost = fit(points + late)
    assert cost is not None
    assert cost == pytest.approx((1e-4, 1e-8), rel=0.01)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([Point(1, 100, 1.0)], (0.0, 0.01)),  # one size cannot tell both apart
        ([Point(1, 0, 1.0)], (1.0, 0.0)),
        ([Point(1, 100, 2.0), Point(1, 1000, 1.0)], None),  # a larger message took less time
    ],
)
def test_costs_are_never_negative(points: list[Point], expected: Any) -> None:
    cost = fit(points)
    assert cost is not None
    assert min(cost) >= 0
    assert expected is None or sum(cost.seconds(u, b) for u, b, _ in points) == pytest.approx(1.0)


def test_nothing_follows_from_nothing() -> None:
    assert fit([]) is None
    assert fit([Point(1, 1, math.nan), Point(1, 1, 0.0)]) is None


# ---------------------------------------------------------------------------------------- link


def times(sizes: list[int], cost: Cost, waiting: Any) -> list[float]:
    """What a rank reports of all-gathers between two ranks, one after the other."""
    links, now = LinkTimes(backend_of("gloo"), 2), 1
    for nbytes in sizes:
        end = now + int(1e9 * (cost.seconds(1, nbytes) + waiting()))
        links.add(Observed("all_gather", (), nbytes, now, end))
        now = end
    return links.encode()


def test_the_link_is_estimated_from_the_rank_that_others_wait_for() -> None:
    cost, sizes = Cost(2e-4, 1e-8), [64, 4096, 100_000, 2_000_000] * 8
    noise = random.Random(0)
    ranks = [times(sizes, cost, lambda: 0.0), times(sizes, cost, lambda: noise.uniform(0.01, 0.1))]
    for rows in (ranks, ranks[::-1]):
        found = fit_link(rows)
        assert found is not None
        assert found.cost(found.round_seconds) == pytest.approx(cost, rel=0.05)


def test_a_rank_that_is_late_in_a_probe_does_not_make_the_link_faster() -> None:
    """It finds what its peer has sent before, and the other one has waited as long."""
    rows = []
    for end in (3_000_000, 5_000_000):
        links = LinkTimes(backend_of("gloo"), 2)
        links.add(Observed("all_reduce", (), 4_000_000, 1, 1 + end))
        rows.append(links.encode())
    found = fit_link(rows, is_probe=True)
    assert found is not None
    assert found.cost(0.0).per_byte == pytest.approx(1e-9)


def test_a_collective_that_queues_behind_another_is_not_charged_for_it() -> None:
    links = LinkTimes(backend_of("gloo"), 2)
    for nbytes, end in ((1_000_000, 10_000_000), (1_000_001, 20_000_000)):
        links.add(Observed("all_gather", (), nbytes, 0, end))
    found = fit_link([links.encode()])
    assert found is not None
    assert found.cost(0.0).seconds(1, 1e6) == pytest.approx(0.01, rel=0.01)


def test_no_link_follows_from_no_collective() -> None:
    links = LinkTimes(backend_of("gloo"), 2)
    assert fit_link([links.encode()] * 2) is None
    links.add(Observed("all_reduce", (0, 1), 100, 1, 2_000_000))  # among some of the ranks
    assert fit_link([links.encode()] * 2) is None


# ------------------------------------------------------------------------------------ schedule


def test_a_burst_of_trials_and_a_report_come_first() -> None:
    schedule = Schedule(5, burst=3)
    assert [[*schedule.trials(step)] for step in range(4, 9)] == [[], [0, 1, 2], [], [], []]
    assert [step for step in range(40) if schedule.reports(step)] == [8, 18, 28, 38]
    assert [step for step in range(40) if schedule.probes(step)] == [6]  # beside no trial
    assert not any(Schedule(5).probes(step) for step in range(40))


def test_trials_are_numbered_without_gaps_and_never_in_a_step_with_a_report() -> None:
    schedule = Schedule(5, burst=3, trials_before=10, trial_every=5)
    assert not any(schedule.reports(step) and schedule.trials(step) for step in range(200))
    later = schedule.paced(60, step_seconds=1.0, trial_seconds=0.0, report_seconds=0.0)
    before = [number for step in range(60) for number in schedule.trials(step)]
    after = [number for step in range(60, 100) for number in later.trials(step)]
    assert after[0] == 10 + len(before)


@pytest.mark.parametrize("trial_every", [4, 10, 31])
def test_reports_do_not_put_trials_off(trial_every: int) -> None:
    nan = math.nan
    schedule, trials = Schedule(5, burst=3, trial_every=trial_every), list[int]()
    for step in range(5, 200):
        trials += [step for _ in schedule.trials(step)]
        if schedule.reports(step):
            schedule = schedule.paced(
                step + 1, step_seconds=nan, trial_seconds=nan, report_seconds=nan
            )
    pauses = [after - before for before, after in pairwise(trials[2:])]
    assert min(pauses) >= trial_every
    assert max(pauses) <= trial_every + 1  # none in a step with a report
    assert max(trials) >= 200 - trial_every - 1


@pytest.mark.parametrize("trial_seconds", [0.001, 0.01, 0.2])
def test_trials_and_reports_take_less_than_two_percent(trial_seconds: float) -> None:
    schedule = Schedule(0).paced(
        0, step_seconds=0.1, trial_seconds=trial_seconds, report_seconds=trial_seconds / 4
    )
    steps = range(20_000)
    spent = sum(trial_seconds * len(schedule.trials(step)) for step in steps)
    spent += sum(trial_seconds / 4 for step in steps if schedule.reports(step))
    assert spent <= 0.02 * 0.1 * len(steps)


def test_what_is_not_known_changes_no_pace() -> None:
    schedule = Schedule(0, trial_every=7, report_every=13)
    nan = math.nan
    paced = schedule.paced(20, step_seconds=nan, trial_seconds=1.0, report_seconds=nan)
    assert (paced.trial_every, paced.report_every) == (7, 13)


# --------------------------------------------------------------------------------- local seconds


def test_a_core_that_others_use_does_not_make_a_hook_slower() -> None:
    async def preempted() -> None:
        time.sleep(0.3)  # as if another thread had the core

    seen = Observation()
    with suppress(StopIteration):
        observe(preempted(), seen).send(None)
    assert seen.local_seconds < 0.1


# ----------------------------------------------------------------------------------- the limit


def test_the_limit_is_the_error_of_the_reference_on_the_whole_model() -> None:
    """Also on the parameters that stay exact, where the reference alone would have an error."""
    parameters = {name: torch.zeros(64, 64) for name in ("tokens", "w")}
    layout = group_parameters([(tuple(parameters), 0)], parameters, {"tokens"}, {})
    knowledge = Knowledge(hooks=3)
    for group, error in zip(layout.groups, (0.1, 0.3), strict=True):
        knowledge.add(group, 2, TrialRecord(error, 4096, (), 0.0, 0.0))
    norms = [3.0, 4.0]
    limit = knowledge.limit(layout, norms, reference=2)
    assert limit == pytest.approx(math.hypot(0.1 * 3.0, 0.3 * 4.0) / 5.0)


def test_what_hooks_in_use_have_lost_counts_more_than_trials() -> None:
    parameters = {name: torch.zeros(size, 64) for name, size in (("a", 1), ("b", 64), ("c", 4096))}
    layout = group_parameters([(tuple(parameters), 0)], parameters, set(), {})
    a, b, c = layout.groups
    knowledge = Knowledge(hooks=2)
    for group, error in ((a, 0.1), (b, 0.5)):
        knowledge.add(group, 1, TrialRecord(error, 64, (), 0.0, 0.0))
    assert [knowledge.error(group, 1) for group in (a, b, c)] == pytest.approx([0.1, 0.5, 0.3])
    for error in (0.4, 0.2, 0.3):
        knowledge.add_check(a, 1, error)
    knowledge.add(a, 1, TrialRecord(0.1, 64, (), 0.0, 0.0))
    assert [knowledge.error(group, 1) for group in (a, b, c)] == pytest.approx([0.3, 0.5, 0.4])
    knowledge.add_check(b, 1, 0.05)
    assert knowledge.error(b, 1) == 0.05
    loaded = Knowledge(hooks=2)
    loaded.load(json.loads(json.dumps(knowledge.to_json())))
    assert loaded.to_json() == knowledge.to_json()


def test_only_the_reference_is_tried_on_parameters_that_stay_exact() -> None:
    parameters = {name: torch.zeros(64, 64) for name in ("tokens", "w")}
    layout = group_parameters([(tuple(parameters), 0)], parameters, {"tokens"}, {})
    tried = {}
    for limit in (0.1, 2):  # a number, and the position of a hook
        candidates = Candidates(("allreduce", "int8", "int4"), (True, False, False), (1, 2), limit)
        control = Controller(candidates, replan=100, backend="gloo", size=2)
        control.use_layout(layout, 0)
        found = [trial[:2] for step in range(100) for trial in control.trials(step)]
        tried[limit] = {hook for group, hook in found if group.is_exact}
    assert tried == {0.1: set(), 2: {2}}


# --------------------------------------------------------------------------- groups and samples


def test_bytes_of_a_group_are_those_of_the_formula() -> None:
    """A sample has some rows of a matrix, and as many columns: of a low rank it sends too much."""
    parameters = {"w": torch.zeros(4096, 64)}
    hook = commhooks.create("powersgd", rank=2, start_step=0)
    layout = group_parameters([(("w",), 4 * 4096 * 64)], parameters, (), {})
    layout = with_wire_bytes(layout, parameters, {1: hook}, size=2)
    of_matrix = 4 * 2 * (4096 + 64)
    assert layout.groups[0].wire_bytes == {1: of_matrix}  # two ranks: each number once
    rows = 4096 // 16
    stages = tuple(Stage(1e-4, "all_reduce", 4.0 * 2 * n) for n in (rows, 64))
    knowledge = Knowledge(hooks=2)
    knowledge.add(layout.groups[0], 1, TrialRecord(0.1, rows * 64, stages, 1e-4, 1e-4))
    nan = math.nan
    agreed = Agreed(
        (), nan, nan, nan, nan, nan, nan, 1.0, (nan,), None, None, nan, (1.0,), (nan,), (), ()
    )
    link = Cost(1e-4, 1e-9)
    specs, lossless = ("allreduce", "powersgd"), (True, False)
    situation = Situation(specs, lossless, layout, knowledge, agreed, link, (1.0,), 0.2, "gloo", 2)
    ((_, choice),) = (group.choices for group in situation.problem(None).groups)
    assert sum(c.wire_bytes(2) for c in choice.collectives) == pytest.approx(of_matrix)


def test_a_formula_that_reads_numbers_is_not_used() -> None:
    """It is another package's, and against the rules; the bytes of trials take its place."""

    class Counting(AllReduce):
        def wire_bytes(self, bucket: GradBucket, size: int) -> int:
            return size * int(bucket.buffer().count_nonzero())

    parameters = {"w": torch.zeros(8, 8)}
    layout = group_parameters([(("w",), 256)], parameters, (), {})
    layout = with_wire_bytes(layout, parameters, {1: Counting(), 2: AllReduce()}, size=2)
    assert layout.groups[0].wire_bytes == {2: 256}


def test_groups_are_those_of_a_bucket_with_a_role_and_a_similar_size() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "h.0.w": (64, 64),
        "h.1.w": (64, 64),
        "h.0.b": (64,),
        "tokens": (64, 64),
        "head": (4, 64),
        "far": (64, 64),
    }
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    buckets = [(("h.0.w", "h.1.w", "h.0.b", "tokens", "head"), 0), (("far",), 0)]
    layout = group_parameters(buckets, parameters, {"h.0.b"}, {"tokens": "embedding"})
    found = [(set(g.names), g.bucket, g.is_exact) for g in layout.groups]
    assert found == [
        ({"h.0.w", "h.1.w"}, 0, False),
        ({"h.0.b"}, 0, True),
        ({"tokens"}, 0, False),
        ({"head"}, 0, False),
        ({"far"}, 1, False),
    ]
    assert layout.groups[0].label == "h.*.w \N{MULTIPLICATION SIGN}2"
    assert layout.groups[3].label == "head"


def bucket_of(shapes: dict[str, tuple[int, ...]]) -> GradBucket:
    tensors = [torch.zeros(shape) for shape in shapes.values()]
    tensors[0] = tensors[0].T.contiguous().T  # strides that are not trivial
    flat = torch.arange(float(sum(t.numel() for t in tensors)))
    return GradBucket(flat, tensors, list(shapes))


def test_a_sample_has_whole_parameters_or_evenly_spaced_rows() -> None:
    bucket = bucket_of({"a": (8, 6), "b": (5,), "c": (100, 10)})
    gradients = dict(zip(bucket.names, bucket.gradients(), strict=True))
    whole = draw_sample(bucket, ["a", "b"], lambda *_: None, 60, turn=0)
    assert whole.names == ["a", "b"]
    assert torch.equal(whole.gradients()[0], gradients["a"])
    assert whole.gradients()[0].stride() == gradients["a"].stride()
    assert draw_sample(bucket, ["a", "b"], lambda *_: None, 50, turn=1).names == ["b"]
    rows = draw_sample(bucket, ["c"], lambda *_: None, 300, turn=5)
    assert torch.equal(rows.gradients()[0], gradients["c"][::4])


def test_a_sample_has_what_has_not_been_sent() -> None:
    bucket = bucket_of({"a": (8, 6), "b": (5,)})
    before = bucket.buffer().clone()

    def residual(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        return before[:48] if name == "a" else None  # as it lies in memory

    sample = draw_sample(bucket, ["a", "b"], residual, 60, turn=0)
    assert torch.equal(sample.gradients()[0], 2 * bucket.gradients()[0])
    assert torch.equal(sample.gradients()[1], bucket.gradients()[1])
    assert torch.equal(bucket.buffer(), before)


class OneRank:
    """A communicator of one rank."""

    size = 1

    async def all_reduce(self, message: Tensor) -> Tensor:
        return message


def test_a_check_compares_the_same_elements_of_each_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "_ELEMENTS", 100)
    bucket = bucket_of({"a": (8, 6), "b": (5,), "c": (100, 10)})
    bucket = bucket_with(bucket, bucket.buffer(), step=3)
    groups = [
        (2, ParameterGroup(("a", "c"), 0, 1048, is_exact=False)),  # every 11th, from the 3rd on
        (4, ParameterGroup(("b",), 0, 5, is_exact=False)),
    ]
    residuals = {"a": 2.0, "b": 3.0, "c": None}

    def residual(name: str, gradient: Tensor, where: slice) -> Tensor | None:
        found = residuals[name]
        return None if found is None else torch.full((gradient.numel(),), found)[where]

    flat = bucket.buffer().clone()
    drawn = check.Check.of(bucket, groups, residual)
    assert drawn is not None
    p = [flat[3:48:11] + 2, flat[48:53] + 3, flat[56::11]]
    assert torch.equal(drawn.p, torch.cat(p))
    with pytest.raises(StopIteration) as end:
        drawn.squares(flat, OneRank()).send(None)  # type: ignore[arg-type]
    squares = {i: found.tolist() for i, found in end.value.value.items()}
    of_two = float(torch.cat([p[0], p[2]]).double().square().sum())
    assert squares == {2: [4.0 * 5, of_two], 4: [9.0 * 5, float(p[1].square().sum())]}
    assert check.Check.of(bucket, [], residual) is None
