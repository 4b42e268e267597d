"""The command line: what it prints, and how it fails."""

import subprocess
import sys
from pathlib import Path

import pytest

import commhooks

pytest.importorskip("click")
from click.testing import CliRunner

from commhooks.cli.commands import commands


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def test_every_command_says_what_it_does() -> None:
    text = run("--help")
    for name in commands.list_commands(None):  # type: ignore[arg-type]
        assert name in text
        assert "Usage" in run(name, "--help")


def test_list_names_every_hook() -> None:
    text = run("list")
    for name in commhooks.available():
        assert name in text
    assert "all-reduce" in text


def test_describe() -> None:
    assert run("describe", "powersgd") == f"{commhooks.describe('powersgd')}\n"


def test_an_unknown_hook_is_one_line() -> None:
    text = run("describe", "powersg", status=1)
    assert text.startswith("Error: no hook is named 'powersg'; did you mean 'powersgd'?")


def test_as_a_module() -> None:
    text = subprocess.check_output([sys.executable, "-m", "commhooks", "--help"], text=True)
    assert text.startswith("Usage: commhooks")


def test_without_the_extra(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('no click', name='click')")
    result = subprocess.run(
        [sys.executable, "-m", "commhooks", "list"],
        env={"PYTHONPATH": f"{tmp_path}:{Path(commhooks.__file__).parents[1]}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "needs click" in result.stderr
    assert "pip install 'commhooks[cli]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
