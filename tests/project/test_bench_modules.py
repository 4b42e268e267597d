"""Benches run by hand; what they import from the package may not be gone by then."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bench").rglob("*.py")
    if path.stem not in ("__init__", "__main__", "conftest") and "gpu" not in path.parts
)


@pytest.mark.parametrize("module", MODULES)
def test_it_imports(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    importlib.import_module(module)
