"""No Python inside the C++ engine, and no algorithm beside its native hooks."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
