"""A compiled module that is not there, or does not load: said plainly, by the doctor as well."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import commhooks
from reducer.extension import REMEDY

pytest.importorskip("click")

COMPILED = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def of_another_python(folder: Path) -> None:
    (folder / "_C.cpython-38-x86_64-linux-gnu.so").write_bytes(b"")


def garbage(folder: Path) -> None:
    (folder / COMPILED).write_bytes(b"\x7fELF, but not really")


def of_another_torch(folder: Path) -> None:
    """Asks for a symbol that this torch does not have."""
    ours = Path(commhooks.__file__).parents[1] / "reducer" / COMPILED
    (folder / COMPILED).write_bytes(ours.read_bytes().replace(b"_ZN5torch", b"_ZN5tarch"))
    (folder / "built_with.json").write_text(json.dumps({"torch": "2.10.9", "cuda": None}))


# An editable installation finds in its sources what the copy lacks.
WITHOUT_EDITABLE = """
import sys

sys.meta_path[:] = [
    finder for finder in sys.meta_path
    if not getattr(finder, "__module__", "").startswith("__editable__")
]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the packages, but nothing compiled."""
    source = Path(commhooks.__file__).parents[1]
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "built_with.json")
    for package in ("commhooks", "reducer"):
        shutil.copytree(source / package, tmp_path / package, ignore=left_out)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (of_another_python, f"no {COMPILED}, but _C.cpython-38-x86_64-linux-gnu.so for another"),
        (garbage, "reducer._C does not load"),
        (of_another_torch, f"against torch 2.10.9, and this is {torch.__version__}"),
    ],
)
def test_the_doctor_says_what_is_wrong_and_what_to_do(
    folder: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(folder / "reducer")
    result = python(folder, "-m", "commhooks", "doctor")
    assert result.returncode == 1
    (engine,) = [line for line in result.stdout.splitlines() if "engine" in line]
    assert "broken" in engine
    assert reason in engine
    assert REMEDY in result.stdout
    assert torch.__version__ in result.stdout  # the rest is looked at as well


def test_everybody_else_is_told(folder: Path) -> None:
    command = python(folder, "-m", "commhooks", "list")
    assert command.returncode == 1
    assert f"has no {COMPILED}" in command.stderr
    assert len(command.stderr.splitlines()) == 1

    use = python(folder, "-c", "import commhooks; commhooks.register")
    assert f"has no {COMPILED}\n{REMEDY}" in use.stderr


def test_other_errors_of_import_are_not_taken_for_it(tmp_path: Path) -> None:
    source = str(Path(commhooks.__file__).parents[1])
    code = f"import sys; sys.path.append({source!r}); sys.modules['commhooks.hook.registry'] = None"
    result = python(tmp_path, "-c", f"{code}; import commhooks")
    assert result.returncode == 1
    assert "import of commhooks.hook.registry halted" in result.stderr
