"""``commhooks plan``, as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
from click.testing import CliRunner

from commhooks import CommHookError
from commhooks.algorithms.adaptive import choices
from commhooks.cli import plan as command
from commhooks.cli.commands import commands
from commhooks.hook.spec import HookSpec, hook_spec
from commhooks.lab.planning import MeasuredGroups, measure_groups
from commhooks.lab.simulation import Job
from commhooks.planning import Plan

BASIC = ("--model", "support.small_models:make", "--world-size", "4", "--link", "1mbit")
CANDIDATES = ("--candidates", "int8,powersgd:rank=2,start_step=0")


@pytest.fixture(autouse=True)
def _models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(commands, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def measured() -> MeasuredGroups:
    """What one run of the command measures."""
    found: list[MeasuredGroups] = []

    def keep(*arguments: Any) -> MeasuredGroups:
        found.append(measure_groups(*arguments))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        patch.setattr(command, "measure_groups", keep)
        run(*BASIC, *CANDIDATES, "--error", "int4")
    return found[0]


@pytest.fixture
def _measured_before(measured: MeasuredGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_groups", lambda *_: measured)


def test_errors_are_those_of_averages_of_different_gradients(measured: MeasuredGroups) -> None:
    weights = [i for i, group in enumerate(measured.groups) if not group.is_exact]
    biases = [i for i, group in enumerate(measured.groups) if group.is_exact]
    for some, kind in ((weights, "weight"), (biases, "bias")):
        names = sorted(name for i in some for name in measured.groups[i].names)
        assert names == [f"0.{kind}", f"2.{kind}", f"3.{kind}"]
    for i in weights:
        hooks = ("allreduce", "int8", "powersgd:rank=2,start_step=0", "int4")
        plain, int8, powersgd, int4 = (measured.outcomes[hook][i].error for hook in hooks)
        assert plain == 0
        assert 0 < int8 < int4 < 0.5
        assert powersgd < 1
    buckets = [{measured.groups[i].bucket for i in some} for some in (weights, biases)]
    assert not set.intersection(*buckets)


@pytest.mark.usefixtures("_measured_before")
def test_a_table_a_plan_and_a_picture(tmp_path: Path) -> None:
    path, image = tmp_path / "plan.json", tmp_path / "step.png"
    options = ("--error", "int4", "--save", str(path), "--plot", str(image))
    text = run(*BASIC, *CANDIDATES, *options)
    assert "Hooks can save at most" in text
    for word in ("4 ranks at 1 Mbit/s", "for gloo", "ms alone", "Saves ", "error"):
        assert word in text
    plan = Plan.load(path)
    assert plan.after.step_seconds < plan.before.step_seconds
    assert plan.error <= plan.limit
    assert any(row.why == "only candidate" for row in plan.rows)
    hooks = plan.hook_of()
    assert all(hooks[name] == "allreduce" for name in hooks if name.endswith("bias"))
    assert any(hooks[name] != "allreduce" for name in hooks)
    assert image.read_bytes().startswith(b"\x89PNG")


def test_hooks_of_other_packages_may_be_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "declared_candidates", lambda: ["natural"])
    specs: list[str] = []

    def note(job: Job, hooks: list[HookSpec], *_: object) -> None:
        specs.extend(map(str, hooks))
        raise CommHookError("nothing is measured here")

    monkeypatch.setattr(command, "measure_groups", note)
    assert "nothing is measured here" in run(*BASIC, "--error", "0.1", status=1)
    assert (specs[0], specs[-1]) == ("allreduce", "natural")
    assert choices.default_candidates()[-1].name == "natural"


@pytest.mark.usefixtures("_measured_before")
def test_a_limit_that_no_candidate_meets(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = run(*BASIC, *CANDIDATES, "--error", "1e-9", "--save", str(path))
    assert "no other candidate keeps the error within 1e-09" in " ".join(text.split())
    assert set(json.loads(path.read_text())["rows"][0]) >= {"names", "hook", "why"}
    assert set(Plan.load(path).hook_of().values()) == {"allreduce"}


@pytest.mark.usefixtures("_measured_before")
def test_a_full_disk_leaves_the_table_and_the_picture(tmp_path: Path) -> None:
    image = tmp_path / "step.png"
    text = run(*BASIC, *CANDIDATES, "--save", "/dev/full", "--plot", str(image), status=1)
    assert "Saves " in text
    assert text.endswith("Error: /dev/full was not written: [Errno 28] No space left on device\n")
    assert image.exists()


@pytest.mark.usefixtures("_measured_before")
def test_candidates_that_fail_are_left_out() -> None:
    named = ("--candidates", "int9,int8,local_sgd,powersgd:rank=2,start_step=0")
    text = run(*BASIC, *named, status=1)
    assert "\nFailed: int9: hook 'int9': no hook is named 'int9'" in text
    assert "\nFailed: local_sgd: candidates: expected hooks that average" in text
    assert "Saves " in text


def test_candidates_that_end_their_process_or_refuse_all_groups() -> None:
    hooks = [
        hook_spec("allreduce"),
        HookSpec("dying", {"name": "failing", "how": "die"}),
        HookSpec("refusing", {"name": "failing", "how": "refuse"}),
        hook_spec("int8"),
    ]
    found = measure_groups(Job("support.failing:net"), hooks, (), world_size=4)
    assert found.reasons == {
        "dying": "rank 1 of 2 died with exit code 7",
        "refusing": "not this model",
    }
    positions = set(range(len(found.groups)))
    assert {hook: set(of_hook) for hook, of_hook in found.outcomes.items()} == {
        "allreduce": positions,
        "dying": set(),
        "refusing": set(),
        "int8": positions,
    }
    assert all(each.error == 0 for each in found.outcomes["allreduce"].values())


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        (["--error", "-1"], 2, "expected a number of at least 0, found -1"),
        (["--error", "nan"], 2, "expected a number of at least 0, found nan"),
        (["--error", "int9"], 2, "no hook is named 'int9'"),
        (["--candidates", "int9"], 1, "no hook is named 'int9'"),
        (["--candidates", "local_sgd"], 1, "does not return the same on all ranks"),
        (["--error", "gossip"], 1, "does not return the same on all ranks"),
        (["--save", "nowhere/plan.json"], 2, "there is no folder 'nowhere'"),
        (["--plot", "step.xyz"], 2, "expected a name that ends with one of"),
        (["--exact", "@head"], 1, "expected one of the roles"),
    ],
)
def test_bad_input(changed: list[str], status: int, words: str) -> None:
    assert words in " ".join(run(*BASIC, *changed, status=status).split())
