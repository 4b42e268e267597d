"""The benchmark of ``auto``, on a tiny model over loopback."""

import itertools
import json
from pathlib import Path

import pytest
from support.planning_problems import random_problem

pytest.importorskip("matplotlib")  # extra `results`

from bench import results_page
from bench.auto import __main__ as bench
from bench.auto import plans, tables
from commhooks.planning.problem import exact
from commhooks.planning.solver import is_within_limit


def test_a_point_is_measured_once_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "auto.json"
    bench.main([str(path), "--quick"])
    assert "tiny-loopback-2: auto" in capsys.readouterr().out
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured again"))
    bench.main([str(path), "--quick"])
    settings = json.loads(path.read_text())["points"]["tiny-loopback-2"]["settings"]
    assert settings.keys() == {"auto", "allreduce", "bf16", "int4", "fewest bytes", "random plan"}
    assert 0 < settings["bf16"]["error"] < 0.01 < settings["int4"]["error"] < 1
    # Over loopback it averages exactly, but for plans that what else runs here may bring about.
    assert settings["auto"]["error"] <= settings["int4"]["error"]
    # It may have tried nothing, because the bytes take so little time.
    assert settings["fewest bytes"]["wire_bytes"] <= settings["allreduce"]["wire_bytes"]
    text = "\n\n".join(results_page.section_of(path))
    assert "### tiny, 0.0 million parameters, 2 ranks, loopback" in text
    assert text.count("\n| ") == 1 + len(settings)


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_within_the_limit_sends_less(seed: int) -> None:
    problem = random_problem(seed, buckets=2, groups=2, hooks=4, limit=0.2)
    found = plans.fewest_bytes(problem)
    allowed = [
        plans.sent_bytes(problem, each)
        for each in itertools.product(*(range(len(g.choices)) for g in problem.groups))
        if is_within_limit(problem, each)
    ]
    assert is_within_limit(problem, found)
    # Errors are rounded up to a thousandth of the limit.
    assert plans.sent_bytes(problem, found) <= 1.01 * min(allowed)


def test_a_random_plan_sends_as_many_bytes() -> None:
    problem = random_problem(0, buckets=3, groups=5, hooks=4)
    nbytes = plans.sent_bytes(problem, exact(problem)) / 2
    drawn = [plans.random_of_bytes(problem, nbytes, seed) for seed in range(3)]
    assert [plans.sent_bytes(problem, each) / nbytes for each in drawn] == pytest.approx(
        [1.0] * 3, abs=0.02
    )
    assert len(set(drawn)) == 3


def test_a_change_of_the_rate_is_over_when_what_follows_is_near_the_right_plan() -> None:
    def turns(*ratios: float) -> dict[str, object]:
        return {"turns": [{"auto": [ratio, ratio], "right": [1.0, 1.0]} for ratio in ratios]}

    assert tables.steps_until_right(turns(3.0, 1.0, 2.0, 2.0, 1.05, 1.2, 1.0), 5) == 20
    assert tables.steps_until_right(turns(1.0, 1.2, 1.2), 5) is None


def test_an_interval_contains_the_median_and_narrows() -> None:
    few, many = (tables.median_interval([0.9, 1.0, 1.2] * n) for n in (2, 50))
    assert few.low <= few.median == many.median == 1.0 <= few.high
    assert many.high - many.low < few.high - few.low
