"""Who may know whom: commhooks -> reducer -> reducer._C, and no Python inside the C++ engine."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imported(path: Path) -> set[str]:
    """The top-level packages that a module imports, at any depth of nesting."""
    packages: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            packages.add(node.module.partition(".")[0])
    return packages


@pytest.mark.parametrize("path", sorted((ROOT / "reducer").glob("*.py")), ids=lambda p: p.name)
def test_the_engine_knows_no_algorithm(path: Path) -> None:
    assert "commhooks" not in imported(path)


SOURCES = [*(ROOT / "csrc/reducer").glob("*"), *(ROOT / "csrc/cpu").glob("*")]


@pytest.mark.parametrize("path", sorted(SOURCES), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_engine_cannot_take_the_gil(path: Path) -> None:
    # Python's lock can only be taken where Python's headers are seen: in csrc/bindings.
    code = re.sub(r"//.*", "", path.read_text())
    assert not re.search(r"pybind|Python\.h|PyGILState|csrc/utils/pybind|bindings/", code)


def test_native_hooks_live_in_the_engine() -> None:
    source = (ROOT / "csrc/reducer/native_hooks.h").read_text()
    assert re.findall(r"class (\w+) final : public Hook", source) == [
        "AverageHook",
        "SparseAverageHook",
        "NoopHook",
    ]
