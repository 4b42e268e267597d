"""Benches run by hand; what they import from the package may not be gone by then."""

import importlib
from pathlib import Path

import pytest

from bench import torch_hooks
from bench.measured_hooks import MEASURED_HOOKS, name_of
from commhooks import algorithms

ROOT = Path(__file__).parents[2]
NEEDS_INTEGRATIONS = ("bench.elastic",)
"""Modules that import what only `make test-all` installs."""
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bench").rglob("*.py")
    if path.stem not in ("__init__", "__main__", "conftest") and "gpu" not in path.parts
)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[pytest.mark.exhaustive] * (module in NEEDS_INTEGRATIONS))
        for module in MODULES
    ],
)
def test_it_imports(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    importlib.import_module(module)


def test_every_hook_is_measured() -> None:
    assert algorithms.HOOKS.keys() <= set(map(name_of, MEASURED_HOOKS))


def test_trials_of_torchs_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_hooks, "TRIALS", 1)
    hook = torch_hooks.in_buckets(torch_hooks.THEIRS["fp16_compress_hook"], 4)
    assert torch_hooks.outcomes(hook) == {"completed": 1}
    text = "Got the following error when running the callback: IndexError: not an index. Use x\ny"
    assert torch_hooks.first_sentence(RuntimeError(text)) == "IndexError: not an index"
