"""Figures of fidelity are those that were measured, and only for the hooks that were measured."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import commhooks
from commhooks.hook import fidelity
from commhooks.hook.fidelity import Fidelity, fidelity_of

FIGURES = {
    "int8": {"digits": 0.06, "bytes": -0.4, "gpt": 2.0, "seeds": 3},
    "topk": {"digits": None, "bytes": 5.7, "seeds": 1},
    "fp8": {"digits": 1.0, "bytes": 1.0, "seeds": 2},
}


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "fidelity.json").write_text(json.dumps(FIGURES))
    monkeypatch.setattr(fidelity, "files", lambda package: tmp_path)
    fidelity._measured.cache_clear()
    yield
    fidelity._measured.cache_clear()


def test_figures_are_those_of_the_file() -> None:
    assert fidelity_of("int8") == Fidelity({"digits": 0.06, "bytes": -0.4, "gpt": 2.0}, 3)
    assert fidelity_of("noop") is None


def test_text() -> None:
    assert str(fidelity_of("int8")) == (
        "+0.1 % on digits, -0.4 % on bytes, +2.0 % on gpt (at least 3 seeds each)"
    )
    assert str(fidelity_of("topk")) == "+5.7 % on bytes (at least 1 seed each)"
    assert "plain averaging's: +0.1 % on digits, -0.4 % on bytes, +2.0" in str(
        commhooks.describe("int8")
    )
    assert "validation loss" not in str(commhooks.describe("noop"))


def test_a_hook_of_another_package_has_no_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commhooks.algorithms.Int8, "__module__", "elsewhere.int8")
    assert commhooks.describe("int8").fidelity is None


def test_without_the_file(tmp_path: Path) -> None:
    (tmp_path / "fidelity.json").unlink()
    assert fidelity_of("int8") is None


def test_the_list_command_shows_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("click")
    from click.testing import CliRunner

    from commhooks.cli.commands import commands

    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(commands, ["list"]).output.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()}
    assert rows["int8"].split()[-3:] == ["+0.1", "-0.4", "+2.0"]
    assert rows["topk"].split()[-3:] == ["-", "+5.7", "-"]
    assert rows["fp16"].split()[-1] == "2.0x"
    assert max(map(len, lines)) <= 80
