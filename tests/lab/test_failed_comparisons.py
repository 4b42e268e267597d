"""Comparisons that fail, in part or as a whole, and input that they refuse."""

import csv
import io
import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from support.links import needs_links

from commhooks import CommHookError, UnknownHookError
from commhooks.cluster import LaunchedRanks
from commhooks.hook import registry
from commhooks.lab.comparison import (
    Comparison,
    ComparisonError,
    ComparisonInterrupted,
    compare,
)
from commhooks.lab.comparison.rank_side import TrainingError
from commhooks.lab.machine import LimitError, ModelSize, check_limits
from commhooks.lab.models import ModelError


@pytest.mark.parametrize("rounds_done", [0, 1])
def test_ctrl_c_keeps_what_has_been_measured(rounds_done: int) -> None:
    calls: list[str] = []

    def interrupt(what: str, done: float, total: float) -> None:
        calls.append(what)
        # In the second round the order is reversed: bf16 comes first.
        if calls.count("loopback: measuring bf16") > rounds_done:
            raise KeyboardInterrupt

    with pytest.raises(ComparisonInterrupted) as caught:
        compare("support.compared:net", ["bf16"], steps=24, links=[1e6], progress=interrupt)
    found = caught.value.comparison
    assert found.links == ["loopback"]
    assert found.hooks == ["bare", "torch", "bf16"][: 2 + rounds_done]
    assert found.row("torch").measured
    assert any("interrupted" in note for note in found.notes)


def test_ctrl_c_before_anything_is_measured() -> None:
    def interrupt(what: str, done: float, total: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        compare("support.compared:net", ["bf16"], steps=1, progress=interrupt)
    assert not isinstance(caught.value, ComparisonInterrupted)


def test_links_of_one_name_cannot_be_told_apart() -> None:
    with pytest.raises(ComparisonError, match="different links, found 1 Gbit/s 2 times"):
        compare("support.compared:net", ["bf16"], links=[1e9, 1.001e9], steps=2)


def compare_over_links_on_hosts(rank: int, size: int) -> None:
    with (
        LaunchedRanks() as ranks,
        pytest.raises(ComparisonError, match="no links for ranks on hosts, which have their own"),
    ):
        compare("support.compared:net", ["bf16"], steps=2, links=[1e9], ranks=ranks)


def test_ranks_of_a_job_have_their_own_links(run_ranks: Any) -> None:
    run_ranks(compare_over_links_on_hosts, 2)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("support.compared:Erratic", "'torch' failed: CommHookError: expected the exact mean"),
        ("support.compared:Divergent", "the gradients of a step are not finite"),
        (
            "support.compared:Mute",
            "'bare' failed: ModelError: expected a model that returns a tensor",
        ),
        (
            "support.compared:Mortal",
            r"(?s)failed: RankError: rank 1 of 2 died with exit code 7.*farewell",
        ),
    ],
)
def test_errors_on_ranks(model: str, says: str) -> None:
    with pytest.raises(ComparisonError, match=says):
        compare(model, ["allreduce"], steps=8)


@pytest.fixture(scope="module")
def failed() -> Iterator[Comparison]:
    hooks = [
        *("int9", "powersgd:rank=x", "route", "elsewhere", "powersgd:rank=96", "failing"),
        *("failing:how=leave", "failing:how=die", "failing:how=nan", "failing:how=explode"),
        *("bf16", "allreduce", "bf16"),
    ]
    yield compare(
        "support.failing:net",
        hooks,
        train="support.compared:train",
        links=[1e9],
        measure_links=False,
        steps=4,
        train_steps=10,
    )
    for name in ("failing", "elsewhere"):
        del registry._hooks[name]


def test_hooks_that_fail_say_why(failed: Comparison) -> None:
    reasons = {failure.hook: failure.reason for failure in failed.failures}
    assert len(reasons) == len(failed.failures) == 10
    for hook, says in {
        "int9": "did you mean 'int8'",
        "powersgd:rank=x": "expected int",
        "route": "needs the option 'rules'",
        "elsewhere": "works on mpi",
        "powersgd:rank=96": "expected a rank of at most",
        "failing": "ValueError: no luck",
        "failing:how=leave": "SystemExit: enough",
        "failing:how=die": "rank 1 of 2 died with exit code 7",
        "failing:how=nan": "gradients of a step are not finite",
        "failing:how=explode": "training diverged",
    }.items():
        assert says in reasons[hook]
        assert "\n" not in reasons[hook]
        assert "Traceback" not in reasons[hook]
    links = {failure.hook: failure.link for failure in failed.failures}
    assert links["int9"] is None
    assert links["failing"] == "loopback"
    details = {failure.hook: failure.details for failure in failed.failures}
    assert "more about it" in details["failing"]
    assert "farewell" in details["failing:how=die"]


def test_the_others_are_measured_as_if_alone(failed: Comparison) -> None:
    """They come after hooks that have ended or broken the processes."""
    assert failed.hooks == ["bare", "torch", "failing:how=explode", "bf16", "allreduce"]
    assert failed.row("failing:how=explode").validation_loss is None
    for name in ("torch", "allreduce"):
        assert failed.row(name).error == pytest.approx(0, abs=1e-6)
        assert failed.row(name, "1 Gbit/s").step_seconds > 0
        assert len(failed.row(name).training) == 10
    assert failed.row("bf16").break_even_bits_per_second is not None


def test_files_contain_the_reasons(failed: Comparison) -> None:
    found = json.loads(json.dumps(failed.to_dict(), allow_nan=False))
    assert [row["hook"] for row in found["failures"]] == [f.hook for f in failed.failures]
    rows = list(csv.DictReader(io.StringIO(failed.to_csv())))
    assert len(rows) == len(failed.rows) + len(failed.failures)
    assert {row["hook"]: row["reason"] for row in rows if row["reason"]} == {
        failure.hook: failure.reason for failure in failed.failures
    }


@pytest.mark.exhaustive  # takes the time-out
def test_a_hook_that_does_not_finish() -> None:
    found = compare("support.failing:net", ["failing:how=hang", "bf16"], steps=2, timeout=60)
    [failure] = found.failures
    assert "time-out of the process group: 60 s" in failure.reason
    assert found.hooks == ["bare", "torch", "bf16"]


def compare_failing_on_hosts(rank: int, size: int) -> Comparison:
    try:
        with LaunchedRanks() as ranks:
            return compare("support.failing:net", ["failing", "int9", "bf16"], steps=2, ranks=ranks)
    finally:
        for name in ("failing", "elsewhere"):
            del registry._hooks[name]


def test_a_hook_that_fails_on_one_rank_of_a_job(run_ranks: Any) -> None:
    first, second = run_ranks(compare_failing_on_hosts, 2)
    assert first == second
    assert {failure.hook for failure in first.failures} == {"int9", "failing"}
    assert first.failures[1].reason.startswith("[rank 1] hook Failing")
    assert first.failures[1].reason.endswith("ValueError: no luck")
    assert first.hooks == ["bare", "torch", "bf16"]


def test_a_hook_that_cannot_be_predicted_is_still_measured() -> None:
    """Among ranks of a simulation it is rank 0, which fails."""
    hooks = ["failing:how=fine", "failing:how=dry", "bf16"]
    found = compare("support.failing:net", hooks, links=[1e9], measure_links=False, steps=2)
    [failure] = found.failures
    assert (failure.hook, failure.link) == ("failing:how=dry", "1 Gbit/s")
    assert found.row("failing:how=dry").break_even_bits_per_second is None
    assert "failing:how=dry is not predicted: " in "".join(found.notes)
    assert found.row("failing:how=fine", "1 Gbit/s").step_seconds > 0


@needs_links
def test_a_rank_that_dies_behind_a_link() -> None:
    with pytest.raises(ComparisonError, match=r"(?s)rank 1 of 2 died.*farewell"):
        compare("support.compared:MortalOverLinks", ["allreduce"], links=[1e9], steps=8)
    hosts = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    assert not re.search(rf"\bch{os.getpid()}[a-z]", hosts.stdout)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"model": "support.compared:nett"}, ModelError, "did you mean 'net'"),
        ({"model": "support.compared:without_input"}, ModelError, "pass --input"),
        ({"input": "support.compared:PARAMETERS"}, ModelError, "expected a callable, found int"),
        ({"hooks": ["powersg"]}, UnknownHookError, "did you mean 'powersgd'"),
        ({"hooks": []}, ComparisonError, "at least one hook"),
        ({"timeout": 0.0}, ComparisonError, "expected a time-out of at most 2000000 s, found 0"),
        ({"timeout": math.inf}, ComparisonError, "found inf"),
        ({"steps": 0}, ComparisonError, "^steps: expected at least 1, found 0"),
        ({"train_steps": 0}, ComparisonError, "training steps: expected at least 1, found 0"),
        ({"world_size": 1}, ComparisonError, "at least 2 ranks, found 1"),
        ({"world_size": 4096}, LimitError, "at most 8 per core"),
        ({"links": [0.0]}, ComparisonError, "expected a rate"),
        (
            {"train": "support.compared:no_generator"},
            TrainingError,
            "expected a generator function",
        ),
    ],
)
def test_bad_input_is_an_error_before_anything_starts(
    options: dict[str, object], kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commhooks.cluster.ranks.RankPool", None)  # nothing can start
    given = {"model": "support.compared:net", "hooks": ["bf16"]} | options
    with pytest.raises(kind, match=says):
        compare(given.pop("model"), given.pop("hooks"), **given)  # type: ignore[arg-type]


def test_memory_is_limited() -> None:
    with pytest.raises(LimitError, match=r"^2 ranks need about 18 TB, .* 8 x 1 TB of gradients,"):
        check_limits(2, ModelSize(10**12, 10**12, 1e-7))
    with pytest.raises(LimitError, match="need about 2 TB"):  # few of the parameters are trained
        check_limits(2, ModelSize(10**12, 10**6, 1e-7))
    check_limits(2, ModelSize(10**6, 10**6, 1e-7))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("support.compared:train_briefly", "ended after 1 steps"),
        ("support.compared:train_without_validation", "expected it to yield a function"),
    ],
)
def test_training_functions_that_do_not_follow_the_protocol(function: str, says: str) -> None:
    with pytest.raises(ComparisonError, match=says):
        compare("support.compared:net", ["allreduce"], steps=1, train=function, train_steps=20)


def test_hooks_that_cannot_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CommHookError("hook 'shy' cannot be simulated")

    monkeypatch.setattr("commhooks.lab.comparison.experiment.measure", refuse)
    found = compare("support.compared:net", ["bf16"], steps=2)
    assert "nothing is predicted: hook 'shy' cannot be simulated" in found.notes
    assert found.row("bf16").break_even_bits_per_second is None
    with pytest.raises(ComparisonError, match="neither measured nor predicted: hook 'shy'"):
        compare("support.compared:net", ["bf16"], links=[1e9], measure_links=False, steps=2)
