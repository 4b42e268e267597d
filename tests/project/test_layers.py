"""The folders of csrc: which may include which, and that only bindings see Python."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
ENGINE = {"bindings/reducer", "host", "packing", "packing/cuda", "reducer"}
KERNELS = {"bindings/commhooks", "codecs", "comm", "lowrank", "sparse"}
MAY_INCLUDE = {
    "shared": set(),
    "packing": {"packing/cuda", "shared"},
    "packing/cuda": {"packing"},
    "reducer": {"packing", "shared"},
    "host": {"packing", "reducer", "shared"},
    "codecs": {"kernels/codecs", "shared"},
    "sparse": {"kernels/codecs", "shared"},
    "lowrank": {"shared"},
    "comm": {"shared"},
    "bindings": {"shared"},
    "bindings/reducer": {"bindings", "host", "packing", "reducer", "shared"},
    "bindings/commhooks": {"bindings", "codecs", "comm", "lowrank", "shared", "sparse"},
}
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h"))


def folder_of(path: Path) -> str:
    return str(path.parent.relative_to(CSRC))


def includes(path: Path) -> list[str]:
    """The project's headers that a file includes, as it names them: from the root of csrc."""
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)


def test_the_readme_states_the_rule_of_every_folder() -> None:
    assert {folder_of(path) for path in FILES} == set(MAY_INCLUDE)
    rows = re.findall(r"^\| `(.*)/` \|.*\|(.*)\|$", (CSRC / "README.md").read_text(), re.MULTILINE)
    stated = {folder: set(re.findall(r"`([^`]+)/`", included)) for folder, included in rows}
    assert stated == MAY_INCLUDE


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CSRC)))
def test_includes(path: Path) -> None:
    folder = folder_of(path)
    included = {str(Path(name).parent) for name in includes(path)}
    assert included <= MAY_INCLUDE[folder] | {folder}


def test_neither_extension_sees_the_other() -> None:
    for one, other in ((ENGINE, KERNELS), (KERNELS, ENGINE)):
        for folder in one:
            assert not MAY_INCLUDE[folder] & other


def test_no_header_includes_itself_through_others() -> None:
    names = {str(path.relative_to(CSRC)): path for path in FILES}
    seen: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name in names and name not in seen:
            for included in includes(names[name]):
                visit(included, (*above, name))
            seen.add(name)

    for name in names:
        visit(name, ())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CSRC)))
def test_only_bindings_see_python(path: Path) -> None:
    # The GIL can only be taken where the headers of Python are included.
    code = re.sub(r"//.*", "", path.read_text())
    sees_python = re.search(r"pybind|Python\.h|PyGILState|csrc/utils/pybind", code)
    assert not sees_python or folder_of(path).startswith("bindings")
