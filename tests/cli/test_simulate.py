"""``commhooks simulate``, as a user runs it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
from click.testing import CliRunner

from commhooks.algorithms.quantized.integers import Int8
from commhooks.cli import simulate as command
from commhooks.cli.commands import commands
from commhooks.lab.simulation import Job, Measurements, measure

BASIC = ("--model", "support.small_models:make", "--link", "1gbit")


@pytest.fixture(autouse=True)
def _models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(commands, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measurements of two hooks and of plain averaging."""
    path = tmp_path_factory.mktemp("simulate") / "measurements.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        run(*BASIC, "--hooks", "int8,topk", "--world-size", "4096", "--measurements", str(path))
    return path


@pytest.fixture
def _measuring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"measured again: {arguments}")

    monkeypatch.setattr(command, "measure", refuse)


@pytest.mark.usefixtures("_measuring_is_an_error")
def test_a_table_of_hooks_and_advice(kept: Path) -> None:
    hooks = ("--hook", "int8", "--hooks", "topk")
    text = run(*BASIC, *hooks, "--world-size", "4096", "--measurements", str(kept))
    for word in ("allreduce", "int8", "topk", "speed-up", "4096 ranks at 1 Gbit/s", "predicted"):
        assert word in text
    assert "for gloo, " in text
    assert "at the speed of this machine" in text
    assert re.search(r"^int8 .* \+0\.6 % ", text, re.M)
    assert "Use " in text or "keep " in text


@pytest.mark.usefixtures("_measuring_is_an_error")
@pytest.mark.parametrize("size", ["8", "64", "2048"])
def test_json_and_a_plot_for_any_number_of_ranks(kept: Path, tmp_path: Path, size: str) -> None:
    image = tmp_path / "curves.png"
    figures = tmp_path / "figures.json"
    options = ("--measurements", str(kept), "--plot", str(image), "--json", str(figures))
    run(*BASIC, "--hook", "int8", "--world-size", size, *options)
    found = json.loads(figures.read_text())
    assert found["model"] == "support.small_models:make"
    assert list(found["hooks"]) == ["allreduce", "bf16", "int8"]
    assert found["hooks"]["int8"]["gradient_bytes"] == 4 * (2 * (64 * 64 + 64) + 64 * 8 + 8)
    assert found["hooks"]["int8"]["step_seconds"] > found["alone_seconds"] > 0
    assert found["curve_ranks"][-1] >= int(size)
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_measuring_is_an_error")
def test_options_of_the_network_change_the_prediction(kept: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"

    def step(*options: str) -> float:
        arguments = ("--hook", "int8", "--world-size", "4096", "--measurements", str(kept))
        run(*BASIC, *arguments, *options, "--json", str(figures))
        found = json.loads(figures.read_text())
        seconds: float = found["hooks"]["int8"]["step_seconds"]
        return seconds

    assert step("--latency", "1ms") > step("--latency", "20us") > step("--latency", "0us")
    assert step("--speed", "100") < step()
    assert step("--cores", "0.5") > step("--cores", "8")


@pytest.mark.usefixtures("_measuring_is_an_error")
def test_the_time_of_a_step_sets_the_speed(kept: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = (*BASIC, "--hook", "int8", "--world-size", "64", "--measurements", str(kept))
    text = run(*arguments, "--step-time", "350ms", "--json", str(figures))
    assert json.loads(figures.read_text())["alone_seconds"] == pytest.approx(0.35, rel=0.01)
    assert "for gloo, unlimited cores per rank, " in text
    assert "4 cores per rank" in run(*arguments, "--step-time", "1s", "--cores", "4")
    text = run(*arguments, "--step-time", "1s", "--speed", "2", status=2)
    assert "--speed and --step-time say the same" in text
    assert "more than 0 s" in run(*arguments, "--step-time", "0s", status=2)


@pytest.mark.usefixtures("_measuring_is_an_error")
def test_a_full_disk_leaves_the_table_and_the_plot(kept: Path, tmp_path: Path) -> None:
    files = ("--json", "/dev/full", "--plot", str(tmp_path / "p.png"))
    options = ("--world-size", "4096", "--measurements", str(kept))
    text = run(*BASIC, "--hook", "int8", *options, *files, status=1)
    assert "speed-up" in text
    assert text.endswith("Error: /dev/full was not written: [Errno 28] No space left on device\n")
    assert (tmp_path / "p.png").exists()


def test_a_hook_that_is_not_in_the_file_is_measured_and_added(kept: Path) -> None:
    before = Measurements.load(kept)
    run(*BASIC, "--hook", "fp16", "--world-size", "64", "--measurements", str(kept))
    after = Measurements.load(kept)
    assert after.dry_runs.keys() - before.dry_runs.keys() == {'{"name": "fp16"}'}
    assert before.dry_runs.items() <= after.dry_runs.items()


@pytest.mark.parametrize(
    "hook",
    [
        "topk:density=0.1",
        'schedule:stages=[[0,"allreduce"],[1500,{"name":"topk","density":0.1}]]',
    ],
)
def test_collectives_that_depend_on_the_world_size(hook: str, tmp_path: Path) -> None:
    figures, image = tmp_path / "figures.json", tmp_path / "curves.png"
    files = ("--json", str(figures), "--plot", str(image))
    run(*BASIC, "--hook", hook, "--world-size", "8", *files)
    found = json.loads(figures.read_text())["hooks"]
    (sparse,) = found.keys() - {"allreduce", "bf16"}
    assert 0 < found[sparse]["wire_bytes"] < found["allreduce"]["wire_bytes"]
    assert len(found[sparse]["curve_seconds"]) == 10
    assert None not in found[sparse]["curve_seconds"]


def test_a_hook_that_cannot_be_predicted_among_so_many_ranks(tmp_path: Path) -> None:
    figures, image = tmp_path / "figures.json", tmp_path / "curves.png"
    files = ("--json", str(figures), "--plot", str(image))
    hook = "support.small_models:Gathering"
    arguments = (*BASIC, "--hook", hook, "--measurements", str(tmp_path / "kept.json"))
    text = run(*arguments, "--world-size", "4096", *files, status=1)
    assert f"\nFailed: {hook}: cannot be predicted among 4096 ranks: its wire_bytes()" in text
    assert list(json.loads(figures.read_text())["hooks"]) == ["allreduce", "bf16"]
    text = run(*arguments, "--world-size", "8", *files)
    curve = json.loads(figures.read_text())["hooks"][hook]["curve_seconds"]
    assert [seconds is None for seconds in curve] == [False] * 7 + [True] * 3


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        (["--model", "gpt3"], 1, ["no model is named 'gpt3'", "gpt2-small"]),
        (["--model", "nowhere:make"], 1, ["nowhere", "cannot be imported"]),
        (["--model", "support.small_models:without_input"], 1, ["example_input()", "--input"]),
        (
            [
                "--model",
                "support.small_models:no_tensor",
                "--input",
                "support.small_models:vectors",
            ],
            1,
            ["expected a model that returns a tensor", "found str"],
        ),
        (["--world-size", "1"], 2, ["x>=2"]),
        (["--world-size", "10", "--ranks-per-node", "4"], 1, ["10 ranks, 4 per node"]),
        (["--link", "-1gbit"], 2, ["expected a rate"]),
        (["--link", "fast"], 2, ["expected a rate"]),
        (["--latency", "-1us"], 2, ["expected a duration"]),
        (["--speed", "0"], 2, ["x>0"]),
    ],
)
def test_bad_input(changed: list[str], status: int, words: list[str]) -> None:
    text = run(*BASIC, "--hook", "bf16", "--world-size", "4", *changed, status=status)
    text = " ".join(text.split())
    for word in words:
        assert word in text


def test_files_that_do_not_fit(kept: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"machine": 1}')
    arguments = ("--hook", "bf16", "--world-size", "4", "--link", "1gbit")
    text = run(*BASIC, *arguments, "--measurements", str(other), status=1)
    assert "delete the file" in text
    text = run("--model", "lstm", *arguments, "--measurements", str(kept), status=1)
    assert "support.small_models:make" in text
    image = tmp_path / "missing" / "curves.png"
    options = ("--measurements", str(kept), "--plot", str(image))
    assert "--plot" in run(*BASIC, "--hook", "int8", "--world-size", "4096", *options, status=2)
    options = ("--measurements", str(kept), "--plot", "curves.xyz")
    text = run(*BASIC, "--hook", "int8", "--world-size", "4096", *options, status=2)
    assert "expected a name that ends with one of" in text


def test_what_a_file_lacks_is_not_measured_on_another_machine(kept: Path, tmp_path: Path) -> None:
    data = json.loads(kept.read_text())
    data["machine"]["cpu"] = "of another machine"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data))
    arguments = ("--world-size", "4096", "--measurements", str(other))
    assert "int8" in run(*BASIC, "--hook", "int8", *arguments)
    text = run(*BASIC, "--hook", "int4", *arguments, status=1)
    assert "lacks int4 for 4096 ranks; expected the machine that it was measured on" in text
    assert json.loads(other.read_text()) == data


def test_a_model_with_unused_parameters() -> None:
    arguments = ("--model", "support.small_models:partly", "--link", "1gbit", "--world-size", "4")
    text = run(*arguments, "--hook", "bf16", status=1)
    assert "pass find_unused_parameters=True" in text
    assert "Traceback" not in text
    assert "bf16" in run(*arguments, "--hook", "bf16", "--find-unused-parameters")


def test_a_hook_that_does_not_work_on_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int8, "backends", ("gloo",))
    options = ("--hook", "int8", "--world-size", "4", "--backend", "nccl")
    assert "int8: supports gloo; found --backend nccl" in run(*BASIC, *options, status=1)


@pytest.mark.usefixtures("_measuring_is_an_error")
def test_hooks_that_fail_are_rows_with_a_reason(kept: Path, tmp_path: Path) -> None:
    figures, image = tmp_path / "figures.json", tmp_path / "curves.png"
    arguments = ("--hooks", "int9,int8,powersgd:rank=x", "--world-size", "4096")
    files = ("--measurements", str(kept), "--json", str(figures), "--plot", str(image))
    text = run(*BASIC, *arguments, *files, status=1)
    assert re.search(r"^int9 +failed *$", text, re.M)
    assert "\nFailed: int9: hook 'int9': no hook is named 'int9'" in text
    assert "\nFailed: powersgd:rank=x: hook 'powersgd:rank=x': option 'rank'" in text
    found = json.loads(figures.read_text())
    assert list(found["hooks"]) == ["allreduce", "bf16", "int8"]
    assert list(found["failures"]) == ["int9", "powersgd:rank=x"]


def test_a_hook_that_ends_its_process_does_not_end_the_others() -> None:
    dying = {"name": "failing", "how": "die", "rank": 0}
    configs: list[dict[str, Any]] = [{"name": "allreduce"}, dying, {"name": "bf16"}]
    found = measure(Job("support.failing:net"), configs, [2])
    assert [config in found for config in configs] == [True, False, True]
    assert found.reason(dying, 2) == "rank 0 of 2 died with exit code 7"
