"""The figures of the language task over links."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")  # extra `results`
from bench import figures, language
from bench.fidelity.runs import Run
from bench.fidelity.tasks import LANGUAGE
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook, trained_on
from bench.language import Courses
from commhooks.hook.spec import hook_spec

ABOUT = {"cpu": "a CPU", "cores": 2, "torch": "2.13.0", "python": "3.11.7"}
HOOKS = {trained.hook: trained for trained in (TrainedHook(REFERENCE), *trained_on("language"))}
FINAL = {"allreduce": 2.0, "bf16": 2.01, "int4": 2.018, "onebit": 2.08, "noop": 2.5}
"""The last losses, of the seed in the middle."""
WORST = {"bf16": 0.004, "int4": 0.008, "onebit": 0.1}
STEP = {"allreduce": 2.0, "bf16": 1.0, "int4": 0.5, "onebit": 0.3, "noop": 0.2}
"""The seconds of a step after the warm-up, which lasts 200 steps of one second more."""


def run_of(name: str, seed: int, rate: float | None = None, seconds: float = 1.0) -> dict[str, Any]:
    loss = FINAL[name] + 0.03 * (seed - 1)
    curve = [(60, 0.1, 2 * loss), (LANGUAGE.steps, seconds, loss)]
    key = HOOKS[name].key(LANGUAGE.usual)
    run = Run("language", seed=seed, loss=loss, wire_bytes=10.0, **key)
    return asdict(run) | {"curve": curve, "bits_per_second": rate, "seconds": seconds}


def steps_of(name: str, rate: float) -> dict[str, Any]:
    points = [
        {"step": step, "seconds": STEP[name] * step + min(step, 200)} for step in range(30, 301, 30)
    ]
    spec = f'schedule:stages=[[0,"allreduce"],[100,"{name}"]]' if name == "onebit" else name
    return {"hook": spec, "bits_per_second": rate, "measured": True, "training": points}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    runs = [run_of(name, seed) for name in FINAL for seed in (0, 1, 2)]
    runs.append(run_of("int4", 0, 1e8, 970.0))
    save(tmp_path, "2026-01-01-a-language", {"about": ABOUT, "runs": runs})
    rows = [steps_of(name, 1e8) for name in STEP]
    rows += [steps_of("bf16", 1e8) | {"hook": "torch"}]
    rows += [steps_of("bf16", 1e8) | {"measured": False}, steps_of("bf16", None) | {"training": []}]
    save(tmp_path, "2026-01-01-a-language-steps-100mbit", {"rows": rows})
    return tmp_path


def save(folder: Path, name: str, document: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(document))


def test_the_time_of_a_training_has_the_warm_up_once(results: Path) -> None:
    int4 = Courses(results).by_hook["int4"]
    assert int4.seconds(1e8, 60) == pytest.approx(60 * 1.5)
    assert int4.seconds(1e8, 45) == pytest.approx(45 * 1.5)
    assert int4.seconds(1e8, 300) == pytest.approx(300 * 0.5 + 200)
    assert int4.seconds(1e8) == pytest.approx(1500 * 0.5 + 200)


def test_hooks_are_matched_by_their_options(results: Path) -> None:
    courses = Courses(results)
    assert [course.name for course in courses.over(1e8)] == [*reversed(STEP)]
    assert courses.over(1e9) == []
    assert courses.by_hook["onebit"].row.trained.warm_up_steps == 100


def test_hooks_get_there_within_one_percent(results: Path) -> None:
    courses = Courses(results)
    arrived = {name for name, course in courses.by_hook.items() if courses.arrives(course)}
    assert arrived == {"allreduce", "bf16", "int4"}
    low, middle, high = (2.018 + change for change in (-0.03, 0, 0.03))
    assert courses.by_hook["int4"].curve[-1] == pytest.approx((1500, middle, low, high))


def headline_of(results: Path, worst: dict[str, float] = WORST) -> str:
    return " ".join(language.headline(Courses(results), worst).split())


def test_the_headline(results: Path) -> None:
    assert headline_of(results) == (
        "A GPT of 3.24 million parameters, 1,500 steps on 4 ranks over 100 Mbit/s: plain averaging "
        "takes 53 min 20 s to a validation loss of 2.000. `int4` takes 15 min 50 s, 3.4 times "
        "faster than plain averaging and 1.79 times faster than `bf16`, and ends at that loss "
        "(+0.9 %; by seed +0.9 % to +0.9 %). `onebit` takes 10 min 50 s, 4.9 times faster than "
        "plain averaging and 2.6 times faster than `bf16`, and ends 4.0 % above (by seed +3.9 % to "
        "+4.1 %), on another task 10.0 % above. Ranks that never average (`noop`) end 25.0 % above."
    )


def test_the_headline_needs_the_other_tasks(results: Path) -> None:
    """A hook that loses more there is not named as one that gets there."""
    text = headline_of(results, WORST | {"int4": 0.05})
    assert "loss of 2.000. `bf16` takes 28 min 20 s" in text
    assert "`int4`" not in text


def test_the_tables(results: Path) -> None:
    found = language.facts(Courses(results), WORST)
    rows = found["trainings over links"].splitlines()
    assert rows[0].endswith("| bytes | 100 Mbit/s |")
    plain = "2.000 | 1.970, 2.000, 2.030 | 100.0 % | 53 min 20 s (1.00 / 0.53)"
    assert f"| `allreduce` | {plain} |" in rows
    assert any(row.startswith("| `onebit` | +4.0 %, does not get there |") for row in rows)
    assert found["int4 over 100 Mbit/s"] == "15 min 50 s"
    assert found["int4 over 100 Mbit/s, to bf16"] == "1.79"
    missing = {found[name] for name in ("int4 over 1 Gbit/s, to bf16", "language diloco")}
    assert missing == {found["int4 over 1 Gbit/s"]} == {"(not yet measured)"}
    assert found["language noop"] == "+25.0 %"


def test_whole_trainings_stand_beside_the_product(results: Path) -> None:
    courses = Courses(results)
    assert courses.deviations == {("int4", 1e8): pytest.approx(970 / 950 - 1)}
    *_, row = language.real_trainings(courses).splitlines()
    assert row == "| `int4` | 100 Mbit/s | 15 min 50 s | 16 min 10 s | +2.1 % |"


def test_the_newest_file_of_a_link_counts(results: Path) -> None:
    rows = [steps_of(name, 1e8) for name in ("allreduce", "bf16")]
    save(results, "2026-01-02-a-language-steps-100mbit", {"rows": rows})
    assert [course.name for course in Courses(results).over(1e8)] == ["bf16", "allreduce"]


def test_the_plot_names_each_hook(results: Path) -> None:
    figures.language(Courses(results), results / "plot.svg")
    text = (results / "plot.svg").read_text()
    assert ">int4 +0.9 %<" in text
    assert ">noop +25.0 %<" in text


def test_the_hooks_of_the_readme_are_those_of_the_task() -> None:
    """The command of bench/README.md measures every hook that is trained."""
    text = (Path(language.__file__).parent / "README.md").read_text()
    (command,) = (part for part in text.split("\n\n") if "bench.language:make_gpt" in part)
    given = command.partition("--hooks ")[2].split()
    hooks = [*given[0].split(","), given[given.index("--hook") + 1].strip("'")]
    configs = [hook_spec(hook).create().to_config() for hook in hooks]
    for trained in HOOKS.values():
        assert trained.create().to_config() in configs, trained.label
