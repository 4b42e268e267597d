"""What the doctor reports on machines with problems."""

import subprocess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks.cluster.links import unavailable
from commhooks.lab import doctor
from commhooks.lab.doctor import Finding, Health
from reducer.extension import REMEDY, Extension


def find(part: str) -> Finding:
    """Check one part only."""
    return Finding(part, *doctor._checks()[part]())


def with_cupy(monkeypatch: pytest.MonkeyPatch, cuda: str | None, **packages: str) -> Finding:
    named = {name.replace("_", "-"): version for name, version in packages.items()}
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "_cupy_packages", lambda: named)
    return find("CuPy")


def test_python_and_torch_are_supported_here() -> None:
    assert find("Python").health is Health.FINE
    assert find("torch") == Finding("torch", Health.FINE, torch.__version__)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu", "3.0"])
def test_an_unsupported_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    finding = find("torch")
    assert finding.health is Health.BROKEN
    assert finding.found == f"{version}; supported: 2.11 to 2.15"
    assert "reinstall commhooks" in finding.remedy


def test_no_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert find("backends").health is Health.BROKEN


@pytest.mark.parametrize(
    ("cuda", "packages", "health", "remedy"),
    [
        (None, {}, Health.ABSENT, ""),
        ("12.8", {}, Health.ABSENT, "pip install 'commhooks[cuda12]'"),
        ("13.0", {"cupy_cuda13x": "14.0"}, Health.FINE, ""),
        ("12.8", {"cupy": "14.0"}, Health.FINE, ""),  # built from source, for any CUDA
        ("13.0", {"cupy_cuda12x": "13.4"}, Health.BROKEN, "pip install 'commhooks[cuda13]'"),
        (
            "12.8",
            {"cupy_cuda12x": "13.4", "cupy_cuda13x": "14.0"},
            Health.BROKEN,
            "pip uninstall cupy-cuda12x cupy-cuda13x",
        ),
    ],
)
def test_cupy_against_torch(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    packages: dict[str, Any],
    health: Health,
    remedy: str,
) -> None:
    finding = with_cupy(monkeypatch, cuda, **packages)
    assert finding.health is health
    assert remedy in finding.remedy


def test_missing_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    for part in ("C++ compiler", "nvcc", "shaped links"):
        assert find(part).health is Health.ABSENT


def test_a_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert find("C++ compiler").health is Health.BROKEN


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_links_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("shaped links").health is Health.FINE

    def refuse(command: Any, **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 2, "", "Operation not permitted")

    monkeypatch.setattr("commhooks.cluster.links.subprocess.run", refuse)
    finding = find("shaped links")
    assert finding.health is Health.ABSENT
    assert "Operation not permitted" in finding.found


@pytest.mark.parametrize("extension", ["reducer._C", "commhooks._C"])
def test_an_extension_that_loads_but_was_compiled_against_another_torch(
    monkeypatch: pytest.MonkeyPatch, extension: str
) -> None:
    versions = {"torch": "2.10.9", "cuda": None}
    monkeypatch.setattr(Extension, "built_with", lambda self: versions)
    finding = find(extension)
    assert finding.health is Health.BROKEN
    assert f"compiled against torch 2.10.9, and this is {torch.__version__}" in finding.found
    assert finding.remedy == REMEDY


@pytest.mark.parametrize("extension", ["reducer._C", "commhooks._C"])
def test_an_extension_for_cuda(monkeypatch: pytest.MonkeyPatch, extension: str) -> None:
    versions = {"torch": torch.__version__, "cuda": "13.0"}
    monkeypatch.setattr(Extension, "built_with", lambda self: versions)
    finding = find(extension)
    assert finding.health is Health.FINE
    assert finding.found == f"compiled against torch {torch.__version__}, for CUDA 13.0"
