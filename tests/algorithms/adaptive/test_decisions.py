"""What is decided by the reports of two ranks, without processes."""

import json
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.algorithms.adaptive.choices import group_parameters, wire_bytes_of
from commhooks.algorithms.adaptive.link import ALL, Probe
from commhooks.algorithms.adaptive.planner import (
    AgreedState,
    Planner,
    Report,
)
from commhooks.algorithms.wrappers.table import check_candidate
from commhooks.costs.step_trace import BucketTrace, Collective, StepTrace
from commhooks.errors import CommHookOptionError
from commhooks.hook.options import from_json
from commhooks.planning import Choice, Group

ELEMENTS = 1_000_000
GROUP = Group(("w",), 0, ELEMENTS)
LIMIT = 0.3


def outcome(error: float, *sent: tuple[str, float]) -> Choice:
    collectives = tuple(Collective(name, nbytes, ALL) for name, nbytes in sent)
    return Choice((1e-4,) * (1 + len(sent)), collectives, error, ELEMENTS)


class TwoRanks:
    """A planner, to which two ranks report, and what they have agreed on."""

    def __init__(
        self,
        groups: Sequence[Group] = (GROUP,),
        limit: float | str = LIMIT,
        saved: Any = None,
        hooks: Sequence[str] = ("allreduce", "int4"),
        sent: Callable[[str, Sequence[str]], int | None] = lambda *_: None,
    ) -> None:
        of_hooks = hooks, {"allreduce"}, limit
        self.planner = Planner(groups, 4 * ELEMENTS, *of_hooks, 2, "gloo", 500, sent)
        before = (
            AgreedState()
            if saved is None
            else from_json(AgreedState, json.loads(json.dumps(saved)))
        )
        self.agreed = self.planner.begin(before, 2)

    def report(
        self,
        *,
        rate: float = 1e7,
        error: float = 0.1,
        norms: tuple[float, ...] = (1.0,),
        step_seconds: float = 1.0,
        spent_seconds: float = 0.0,
        byte_cpu_seconds: float = 0.0,
        launches: tuple[float, ...] = (0.01,),
    ) -> str | None:
        """Report as agreed on; return why there is a new plan, if there is one.

        ``error``: of int4, in trials or in use.
        """
        agreed, reports = self.agreed, []
        for i in range(2):  # the second rank is slower
            report = Report(spent_seconds, norms=dict(enumerate(norms)))
            report.outcomes = {
                (group, hook): outcome(error, ("all_gather", ELEMENTS / 2))
                for group, hooks in agreed.trials.items()
                for hook in set(hooks) - {"allreduce"}
            }
            if not agreed.trials:
                buckets = tuple(BucketTrace(4 * ELEMENTS, each, 0.0) for each in launches)
                step = StepTrace(buckets, 0.01, is_native=False)
                report.step, report.step_seconds, report.cores = step, step_seconds * (1 + i), 2.0
                report.probe = Probe(1e-4, 1 / rate, byte_cpu_seconds * (1 + i))
                lossy = self.planner.lossy(self.agreed)
                report.errors = dict.fromkeys(lossy[:1], error)
            reports.append(report)
        before = len(self.agreed.history)
        reports = pickle.loads(pickle.dumps(reports))
        decided = self.planner.decide(reports, self.agreed, agreed.report + 1)
        self.agreed = pickle.loads(pickle.dumps(decided))
        found = self.agreed.history[before:]
        return found[0].reason if found else None

    @property
    def hooks(self) -> dict[str, str]:
        return self.agreed.plan.hook_of()

    @property
    def hook(self) -> str:
        return self.hooks["w"]

    @property
    def step(self) -> int:
        """When the next report is due."""
        return self.agreed.report


@pytest.fixture
def ranks() -> TwoRanks:
    """Two ranks with a first plan."""
    found = TwoRanks()
    assert found.report() is None
    assert found.report() == "the first plan"
    assert found.hook == "int4"
    return found


def test_steps_are_timed_then_candidates_are_tried_then_there_is_a_plan() -> None:
    ranks = TwoRanks()
    agreed = ranks.agreed
    assert (agreed.start, agreed.report, agreed.probe) == (2, 6, 2**20 // 4)
    assert [step for step in range(10) if agreed.is_check(step)] == [5]
    assert ranks.report() is None
    agreed = ranks.agreed
    assert [step for step in range(20) if agreed.is_trial(step)] == [*range(8, 16)]
    assert (agreed.trials, agreed.report) == ({0: ["allreduce", "int4"]}, 16)
    assert ranks.report() == "the first plan"
    assert ranks.hook == "int4"
    assert ranks.step == 28  # a check soon: residuals may grow


def test_what_all_ranks_know_together(ranks: TwoRanks) -> None:
    metrics = ranks.agreed.metrics
    assert metrics["step_seconds"] == 2.0  # of the slowest
    assert metrics["link_megabits_per_second"] == pytest.approx(80)
    assert metrics["limit"] == LIMIT
    assert metrics["error"] == pytest.approx(0.1 / math.sqrt(1 - 0.1**2))  # with error feedback


@pytest.mark.parametrize(("byte_cpu_seconds", "hook"), [(0.0, "allreduce"), (1e-7, "int4")])
def test_messages_that_keep_cores_busy_are_worth_less(byte_cpu_seconds: float, hook: str) -> None:
    """On a link that takes no time."""
    ranks = TwoRanks()
    for _ in range(2):
        ranks.report(rate=1e15, byte_cpu_seconds=byte_cpu_seconds)
    assert ranks.hook == hook


def test_nothing_is_tried_where_no_hook_can_save_enough() -> None:
    ranks = TwoRanks()
    assert ranks.report(rate=1e9) == "the first plan"
    assert ranks.hook == "allreduce"
    assert "a hook that sends nothing saves 0.2% of a step" in str(ranks.agreed.plan)
    assert ranks.step > 500
    assert ranks.report(rate=1e7) is None  # it looks again, and now tries the candidates
    assert ranks.report() == "500 steps since the last plan"
    assert ranks.hook == "int4"


def test_nothing_changes_without_a_reason(ranks: TwoRanks) -> None:
    while ranks.step < 500:
        assert ranks.report() is None


def test_checks_come_soon_after_a_new_plan_then_take_a_hundredth_of_the_time(
    ranks: TwoRanks,
) -> None:
    """Errors grow for some steps with what hooks have not sent."""
    made, checks = ranks.agreed.history[0].step, [ranks.step]
    while checks[-1] < made + 400:
        assert ranks.report(spent_seconds=4.0) is None  # two steps
        checks.append(ranks.step)
    assert checks[0] - made <= 12
    since = [step - made for step in checks]
    assert all(b <= 2 * a + 3 for a, b in pairwise(since))
    assert 200 <= checks[-1] - checks[-2] <= 205


def test_a_plan_that_stays_for_another_link_is_checked_as_soon(ranks: TwoRanks) -> None:
    """Its hooks have not changed, so their errors go on growing."""
    made = ranks.step - 11
    assert str(ranks.report(rate=7e6, spent_seconds=4.0)).startswith("the link changed")
    assert ranks.hook == "int4"
    assert ranks.step <= made + 2 * 11 + 3


def test_a_plan_beyond_its_limit_is_left_at_the_next_check(ranks: TwoRanks) -> None:
    for error, times in ((0.3, 1.048), (0.33, 1.165)):  # with error feedback
        assert error / math.sqrt(1 - error**2) == pytest.approx(times * LIMIT, rel=1e-3)
    assert ranks.report(error=0.3) is None
    assert ranks.report(error=0.33) == "the error of the plan is 0.35, its limit 0.3"
    assert ranks.hook == "allreduce"


def test_what_a_hook_has_lost_on_one_group_counts_for_all() -> None:
    """Trials of it on the other group have shown less."""
    parameters = {"v": torch.zeros(1000, 1000), "w": torch.zeros(1000, 1000)}
    ranks = TwoRanks(group_parameters(["w", "v"], parameters, (), {}))
    for _ in range(2):
        ranks.report(norms=(1.0, 0.3), launches=(0.01, 0.01))
    assert ranks.hooks == {"w": "int4", "v": "int4"}
    assert ranks.report(norms=(1.0, 0.3), launches=(0.01, 0.01), error=0.8)  # on w
    assert ranks.hooks == {"w": "allreduce", "v": "allreduce"}


@pytest.mark.parametrize(("small", "large"), [(1.15, 1.3), (1 / 1.15, 1 / 1.35)])
def test_a_fifth_of_the_rate_is_a_reason(ranks: TwoRanks, small: float, large: float) -> None:
    assert ranks.report(rate=1e7 * small) is None
    assert str(ranks.report(rate=1e7 / large)).startswith("the link changed from 80 to ")


def test_every_so_many_steps_candidates_are_tried_again(ranks: TwoRanks) -> None:
    made = ranks.agreed.history[0].step
    while not ranks.agreed.trials:
        assert ranks.report() is None
    assert made + 500 <= ranks.agreed.start <= made + 520
    assert ranks.report(error=0.9) == "500 steps since the last plan"
    assert ranks.hook == "int4"  # what it has lost in use counts


def test_gradients_that_are_not_finite_are_tried_again() -> None:
    ranks = TwoRanks()
    assert ranks.report(norms=(math.nan,)) is None
    assert ranks.report() is None
    assert ranks.report(error=math.nan) is None
    assert ranks.report() == "the first plan"


def test_a_resumed_run_keeps_its_plan_and_measures_again(ranks: TwoRanks) -> None:
    saved = ranks.agreed.to_json()
    resumed = TwoRanks(saved=saved)
    assert resumed.hook == "int4"
    assert resumed.agreed.metrics["error"] == ranks.agreed.metrics["error"]
    assert resumed.report() is None
    assert resumed.hook == "int4"
    assert resumed.report() == "new buckets, or a resumed run"
    assert resumed.hook == "int4"
    assert resumed.agreed.to_json()["history"][:1] == saved["history"]


def test_the_limit_is_the_error_of_the_reference_on_the_whole_model() -> None:
    """Also on the parameters that stay exact, where the reference alone would have an error."""
    parameters = {name: torch.zeros(1000, 1000) for name in ("tokens", "w")}
    groups = group_parameters([tuple(parameters)], parameters, {"tokens"}, {})
    ranks = TwoRanks(groups, limit="int4")
    ranks.report(norms=(3.0, 4.0))
    assert ranks.agreed.trials == {0: ["int4"], 1: ["allreduce", "int4"]}
    ranks.report(norms=(3.0, 4.0), error=0.2)
    assert ranks.agreed.metrics["limit"] == pytest.approx(0.2)
    numbers = TwoRanks(groups)  # a number needs no reference
    numbers.report(norms=(3.0, 4.0))
    assert [groups[i].names for i in numbers.agreed.trials] == [("w",)]


def test_bytes_of_a_group_are_those_of_the_formula() -> None:
    """A sample has some rows of a matrix, and as many columns: of a low rank it sends too much."""
    parameters = {"w": torch.zeros(4096, 64)}
    hook = commhooks.create("powersgd", rank=2, start_step=0)
    of_matrix = 4 * 2 * (4096 + 64)
    assert wire_bytes_of(hook, ["w"], parameters, 2) == of_matrix  # two ranks: each number once

    def sent(spec: str, names: Sequence[str]) -> int | None:
        return wire_bytes_of(hook, names, parameters, 2) if spec == "powersgd" else None

    groups, rows = group_parameters([("w",)], parameters, (), {}), 4096 // 16
    ranks = TwoRanks(groups, sent=sent, hooks=("allreduce", "powersgd"))
    ranks.report()
    of_rows = [("all_reduce", 4.0 * 2 * n) for n in (rows, 64)]
    trial = {(0, "powersgd"): replace(outcome(0.1, *of_rows), elements=rows * 64)}
    ranks.agreed = ranks.planner.decide([Report(outcomes=trial)], ranks.agreed, 16)
    assert ranks.hook == "powersgd"
    assert ranks.agreed.plan.wire_bytes == pytest.approx(of_matrix)


def test_a_trial_counts_if_all_ranks_have_done_the_same() -> None:
    ranks = TwoRanks()
    ranks.report()
    trial = {(0, "int4"): outcome(0.1, ("all_gather", ELEMENTS / 2))}
    other = {(0, "int4"): outcome(0.1, ("all_reduce", 1.0))}
    for reported in (other, {}):
        reports = [Report(outcomes=trial), Report(outcomes=reported)]
        again = ranks.planner.decide(reports, ranks.agreed, 16)
        assert not again.history
        assert again.trials
    reports = [Report(outcomes=trial), Report(outcomes=trial)]
    ranks.agreed = ranks.planner.decide(reports, ranks.agreed, 16)
    assert ranks.hook == "int4"


# ----------------------------------------------------------------------------------- candidates


@dataclass
class Delayed(commhooks.CommHook):
    @property
    def has_exchanges(self) -> bool:
        return True

    async def reduce(self, bucket: Any, comm: Any) -> Tensor:
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (Delayed(), "goes on with exchanges between steps"),
        (commhooks.create("auto", candidates=["int4"]), "chooses hooks itself"),
        (commhooks.create("guard", inner="int4", max_error=0.1), "chooses hooks itself"),
        (commhooks.create("diloco", delay=1), "does not return the same on all ranks"),
    ],
)
def test_hooks_that_cannot_be_candidates(hook: commhooks.CommHook, problem: str) -> None:
    with pytest.raises(CommHookOptionError, match=f"option 'x': expected hooks that .*{problem}"):
        check_candidate(hook, "option 'x'")
