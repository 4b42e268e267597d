"""When ranks make new plans and probe the link: two controllers, without processes."""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.algorithms import Auto
from commhooks.algorithms.adaptive.candidates import check_candidate
from commhooks.algorithms.adaptive.control import Candidates, Controller
from commhooks.algorithms.adaptive.groups import Layout, ParameterGroup
from commhooks.algorithms.adaptive.measurement import Measurement
from commhooks.algorithms.adaptive.observation import Observed
from commhooks.algorithms.adaptive.report import Stage, TrialRecord
from commhooks.algorithms.adaptive.timing import HOST
from commhooks.errors import CommHookMismatchError, CommHookOptionError

ELEMENTS = 1_000_000
GROUP = ParameterGroup(("w",), 0, ELEMENTS, is_exact=False)
LAYOUT = Layout((("w",),), (4 * ELEMENTS,), (GROUP,))
LIMIT = 0.3


class TwoRanks:
    """The controllers of two ranks, which gather reports and digests as ranks do."""

    def __init__(self) -> None:
        candidates = Candidates(("allreduce", "int4"), (True, False), (1,), LIMIT)
        self.ranks = [Controller(candidates, replan=50, backend="gloo", size=2) for _ in range(2)]
        self.now = 1
        self.set_error(0.1)
        for rank in self.ranks:
            rank.use_layout(LAYOUT, 0)

    def set_error(self, error: float) -> None:
        """Let int4 have this error in the next trials."""
        stages = (Stage(1e-4, "all_gather", ELEMENTS / 2),)
        for rank in self.ranks:
            for _ in range(3):
                record = TrialRecord(error, ELEMENTS, stages, 1e-4, 1e-4)
                rank.knowledge.add(GROUP, 1, record)

    def report(
        self,
        step: int,
        *,
        rate: float = 1e7,
        norm: float = 1.0,
        step_seconds: float = 1.0,
        byte_cpu_seconds: float = 0.0,
    ) -> str | None:
        """Report in ``step``; return why there is a new plan, if there is one."""
        for i, rank in enumerate(self.ranks):
            for _ in range(4):
                start, self.now = self.now, self.now + int(1e9 * 4e6 / rate) + i
                rank.window.links.add(Observed("all_reduce", (), 4_000_000, start, self.now))
            rank.window.steps.append(step_seconds * (1 + i))
            rank.window.forwards.append(0.01)
            rank.window.launches[0] = [0.01]
            rank.window.byte_cpu_seconds = [byte_cpu_seconds * (1 + i)]
            if i == 1:  # the other one does not know
                rank.window.squares[0] = torch.tensor(norm**2)
        rows = [rank.encode(step, 2.0) for rank in self.ranks]
        before = len(self.ranks[0].history)
        for rank in self.ranks:
            rank.take(rows, step, step + 1)
        for rank in self.ranks:
            rank.confirm([each.digest for each in self.ranks])
        assert self.ranks[0].plan == self.ranks[1].plan
        assert self.ranks[0].history == self.ranks[1].history
        assert self.ranks[0].schedule == self.ranks[1].schedule
        found = self.ranks[0].history[before:]
        return found[0].reason if found else None


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    """Two ranks with a first plan, which was made in step 11."""
    monkeypatch.setattr(Controller, "_has_time", lambda *_: True)
    found = TwoRanks()
    assert found.report(10) == "the first plan"
    plan = found.ranks[0].plan
    assert plan is not None
    assert plan.hook_of() == {"w": "int4"}
    return found


def test_what_all_ranks_know_together(ranks: TwoRanks) -> None:
    agreed: Any = ranks.ranks[0]._agreed
    assert agreed == ranks.ranks[1]._agreed
    assert agreed.step_seconds == 2.0  # of the slowest
    assert agreed.norms == (1.0,)  # of the rank that knows
    last = agreed.link.last
    assert last.seconds / last.bytes == pytest.approx(1e-7, rel=1e-6)  # of the fastest


@pytest.mark.parametrize(("byte_cpu_seconds", "hook"), [(0.0, "allreduce"), (1e-7, "int4")])
def test_messages_that_keep_cores_busy_are_worth_less(byte_cpu_seconds: float, hook: str) -> None:
    """On a link that takes no time."""
    ranks = TwoRanks()
    ranks.report(10, rate=1e15, byte_cpu_seconds=byte_cpu_seconds)
    (rank, _) = ranks.ranks
    assert rank._link.byte_cpu_seconds == byte_cpu_seconds  # of the rank that was less busy
    assert rank.plan is not None
    assert rank.plan.hook_of() == {"w": hook}


def test_nothing_changes_without_a_reason(ranks: TwoRanks) -> None:
    assert [ranks.report(step) for step in range(11, 60)] == [None] * 49


def test_a_plan_beyond_one_and_a_half_of_the_limit_is_left(ranks: TwoRanks) -> None:
    for error, times in ((0.39, 1.412), (0.42, 1.543)):  # with error feedback
        assert error / math.sqrt(1 - error**2) == pytest.approx(times * LIMIT, rel=1e-3)
    ranks.set_error(0.39)
    assert ranks.report(20) is None
    ranks.set_error(0.42)
    assert ranks.report(30) == "the error of the plan is 0.463, its limit 0.3"
    plan = ranks.ranks[0].plan
    assert plan is not None
    assert plan.hook_of() == {"w": "allreduce"}


def test_a_new_plan_is_checked_soon_however_rare_reports_are() -> None:
    """It rests on trials, which have no residual."""
    ranks = TwoRanks()
    for rank in ranks.ranks:
        rank.window.report_seconds.append(3.0)  # so they are due every 150 steps
    assert ranks.report(10) == "the first plan"
    (rank, _) = ranks.ranks
    assert [step for step in range(12, 400) if rank.reports(step)] == [21, 161, 311]
    assert ranks.report(20) is None
    assert [step for step in range(22, 400) if rank.reports(step)] == [171, 321]


def test_a_cheap_trial_does_not_bring_the_next_one_forward(ranks: TwoRanks) -> None:
    """The next one may be that of another group and hook, and take ten times as long."""
    for step, seconds in ((20, 1.0), (30, 0.0)):
        for rank in ranks.ranks:
            rank.window.trial_seconds.append(seconds)
        assert ranks.report(step) is None
    schedule = ranks.ranks[0].schedule
    assert schedule is not None
    assert schedule.trial_every == 50  # half a second, of two in each step


@pytest.mark.parametrize(("small", "large"), [(1.15, 1.25), (1 / 1.15, 1 / 1.35)])
def test_a_fifth_of_the_rate_is_a_reason(ranks: TwoRanks, small: float, large: float) -> None:
    assert ranks.report(20, rate=1e7 * small) is None
    assert str(ranks.report(30, rate=1e7 / large)).startswith("the link changed from 80 to ")


@pytest.mark.parametrize(("small", "large"), [(1.45, 1.6), (0.55, 0.4)])
def test_half_of_the_norm_is_a_reason(ranks: TwoRanks, small: float, large: float) -> None:
    assert [ranks.report(step, norm=small) for step in (12, 14, 16)] == [None] * 3
    assert any(ranks.report(step, norm=large) for step in (18, 20, 22))
    assert "the norm of the gradient changed from 1 to" in ranks.ranks[0].history[-1].reason


def test_every_so_many_steps_there_is_a_new_plan(ranks: TwoRanks) -> None:
    assert ranks.report(59) is None
    assert ranks.report(60) == "50 steps since the last plan"


def test_plans_that_differ_are_not_used(ranks: TwoRanks) -> None:
    one = ranks.ranks[0]
    one.proposal = one.plan
    with pytest.raises(CommHookMismatchError, match="expected the same plan on all ranks"):
        one.confirm([one.digest, one.digest + 1])
    rows = [each.encode(70, 2.0) for each in ranks.ranks]
    rows[1][0] += 1
    with pytest.raises(CommHookMismatchError, match="expected the same plan on all ranks"):
        one.take(rows, 70, 71)


@pytest.mark.parametrize("step_seconds", [0.01, 10.0])
def test_probes_have_to_be_cheap(step_seconds: float) -> None:
    ranks = TwoRanks()
    ranks.report(10, step_seconds=step_seconds)
    ranks.report(20, step_seconds=step_seconds)
    for rank in ranks.ranks:
        nothing: Any = SimpleNamespace(link=None, probe=None, byte_cpu_seconds=math.nan)
        rank._link.take(nothing, 1000, most_steps=50)
        assert rank._link.wants_probe
        rank._plan_probe(30)
    elements = {rank.probe_elements(31) for rank in ranks.ranks}
    if step_seconds < 1:
        assert elements == {0}
    else:
        assert elements == {2**20 // 4}
        assert {rank.probe_elements(32) for rank in ranks.ranks} == {0}


def test_the_first_plan_and_probe_do_not_put_off_the_second_plan() -> None:
    """The first plan rests on one trial of each hook."""
    ranks = TwoRanks()
    for rank in ranks.ranks:
        rank.window.probe_seconds.append(100.0)
    assert ranks.report(10) == "the first plan"
    for rank in ranks.ranks:
        rank._planning_seconds = 100.0
    assert "the link changed" in str(ranks.report(20, rate=5e6))
    for rank in ranks.ranks:
        rank._planning_seconds = 100.0
    assert ranks.report(30, rate=1e7) is None


def test_a_reader_of_a_report_knows_what_nobody_measured() -> None:
    ranks = TwoRanks()
    rows = [rank.encode(10, 2.0) for rank in ranks.ranks]
    ranks.ranks[0].take(rows, 10, 11)
    agreed: Any = ranks.ranks[0]._agreed
    assert math.isnan(agreed.step_seconds)
    assert agreed.link is None
    assert ranks.ranks[0].proposal is None


def test_a_picture_of_the_step_before_and_after(ranks: TwoRanks, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    hook = commhooks.create("auto", candidates=["int4"])
    assert isinstance(hook, Auto)
    with pytest.raises(commhooks.CommHookStateError, match="after the first plan"):
        hook.plot(tmp_path / "step.png")
    control = ranks.ranks[0]
    assert control.layout is not None
    hook._measuring = Measurement(
        control, {}, hook._table, 0, {(): control.layout}.__getitem__, HOST
    )
    hook.plan = control.plan
    hook.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


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
        (commhooks.create("auto", candidates=["int4"]), "chooses hooks itself, in 'auto'"),
        (commhooks.create("guard", inner="int4", max_error=0.1), "in 'guard'"),
        (commhooks.create("diloco", delay=1), "does not return the same on all ranks"),
    ],
)
def test_hooks_that_cannot_be_candidates(hook: commhooks.CommHook, problem: str) -> None:
    with pytest.raises(CommHookOptionError, match=f"option 'x': expected hooks that .*{problem}"):
        check_candidate(hook, "option 'x'")
