"""A compiled module that does not load: said plainly, by the doctor as well, and not replaced."""

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

SOURCE = Path(commhooks.__file__).parents[1]
COMPILED = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def of_another_python(folder: Path) -> None:
    (folder / "_C.cpython-38-x86_64-linux-gnu.so").write_bytes(b"")


def garbage(folder: Path) -> None:
    (folder / COMPILED).write_bytes(b"\x7fELF, but not really")


def of_another_torch(folder: Path) -> None:
    """Asks for a symbol that this torch does not have."""
    working = (SOURCE / folder.name / COMPILED).read_bytes()
    assert b"_ZN3c10" in working
    (folder / COMPILED).write_bytes(working.replace(b"_ZN3c10", b"_ZN3c11"))
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
    """A folder with the packages, but nothing compiled."""
    left_out = shutil.ignore_patterns("*.so", "built_with.json")
    for package in ("commhooks", "reducer"):
        shutil.copytree(SOURCE / package, tmp_path / package, ignore=left_out)
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


def provide(package: Path) -> None:
    """Put the compiled module of this installation into a package of the copy."""
    for name in (COMPILED, "built_with.json"):
        (package / name).symlink_to(SOURCE / package.name / name)


@pytest.mark.parametrize(
    ("broken", "working"),
    [
        pytest.param("reducer", "commhooks", marks=pytest.mark.exhaustive),
        ("commhooks", "reducer"),
    ],
)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(  # see test_everybody_else_is_told
            of_another_python,
            f"no {COMPILED}, but _C.cpython-38-x86_64-linux-gnu.so",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(garbage, "_C does not load", marks=pytest.mark.exhaustive),
        (of_another_torch, f"against torch 2.10.9, and this is {torch.__version__}"),
    ],
)
def test_the_doctor_says_what_is_wrong_and_what_to_do(
    folder: Path, damage: Callable[[Path], None], reason: str, broken: str, working: str
) -> None:
    damage(folder / broken)
    provide(folder / working)
    result = python(folder, "-m", "commhooks", "doctor")
    assert result.returncode == 1
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert lines[f"{broken}._C"].split()[1] == "broken"
    assert reason in lines[f"{broken}._C"]
    assert lines[f"{working}._C"].split()[1] == "fine"
    assert REMEDY in result.stdout
    assert torch.__version__ in result.stdout  # the rest is looked at as well


TRY = """
for use in {uses}:
    try:
        exec(use)
    except ImportError as error:
        print(error, *error.__notes__, sep="\\n")
"""


@pytest.mark.parametrize(
    ("broken", "working"),
    [
        ("reducer", "commhooks"),
        pytest.param("commhooks", "reducer", marks=pytest.mark.exhaustive),
    ],
)
def test_everybody_else_is_told(folder: Path, broken: str, working: str) -> None:
    of_another_python(folder / broken)
    provide(folder / working)
    reason = f"{broken}._C is not compiled for this Python: {folder / broken} has no {COMPILED}"
    command = python(folder, "-m", "commhooks", "list")
    assert command.returncode == 1
    assert reason in command.stderr
    assert len(command.stderr.splitlines()) == 1

    uses = [
        "import commhooks; commhooks.register",
        "from commhooks import register",
        f"from {broken} import DistributedDataParallel",
    ]
    found = python(folder, "-c", TRY.format(uses=uses))
    assert found.stdout.count(reason) == found.stdout.count(REMEDY) == len(uses), found


def test_the_engine_works_alone(folder: Path) -> None:
    """Without ``commhooks._C``, which it does not know."""
    provide(folder / "reducer")
    code = "import reducer, sys; assert 'commhooks' not in sys.modules; print(reducer.Reducer)"
    assert "Reducer" in python(folder, "-c", code).stdout


def test_other_errors_of_import_are_not_taken_for_it(tmp_path: Path) -> None:
    missing = "sys.modules['commhooks.hook.registry'] = None"
    code = f"import sys; sys.path.append({str(SOURCE)!r}); {missing}; import commhooks"
    result = python(tmp_path, "-c", code)
    assert result.returncode == 1
    assert "import of commhooks.hook.registry halted" in result.stderr
