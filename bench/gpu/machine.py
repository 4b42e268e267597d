"""The machine of a run, and whether a run is possible."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement

SANITIZER = "compute-sanitizer"
NEEDED = ("torch>=2.11", "numpy>=1.26", "pytest>=8", "setuptools>=77")
REPORTED = ("torch", "numpy", "cupy", "pytest", "pytest-benchmark", "pytest-xdist", "setuptools",
            "ninja")  # fmt: skip
DEVICE_GIB_OF_WORKER = 8


def missing(requirements: Iterable[str]) -> list[str]:
    """Return what this machine lacks or has too old, as in "no ninja"."""
    return [reason for requirement in requirements if (reason := _problem(requirement))]


def _problem(text: str) -> str | None:
    if text == SANITIZER:
        return None if find_sanitizer() else f"no {text}"
    needed = Requirement(text)
    version = _version(needed.name)
    if version is None:
        return f"no {_distributions(needed.name)[0]}"
    if not needed.specifier.contains(version, prereleases=True):
        return f"{needed.name} {version}, expected {needed.specifier}"
    return None


def count_workers() -> int:
    """Return how many tests run at a time, each with up to three processes on the device."""
    import torch

    limits = [8, (os.cpu_count() or 1) // 2]
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory >> 30
        limits.append(memory // DEVICE_GIB_OF_WORKER)
    return max(1, min(limits))


def find_sanitizer() -> str | None:
    """Find compute-sanitizer, also beside an nvcc that is not on the PATH."""
    home = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    return shutil.which(SANITIZER) or shutil.which(SANITIZER, path=home / "bin")


def describe(directory: Path) -> dict[str, object]:
    """Return the machine, the driver, versions and the commit, as JSON types."""
    import torch
    from torch.utils import collect_env

    first_line = partial(collect_env.run_and_return_first_line, collect_env.run)
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "devices": [
            f"{device.name}, {device.total_memory / 2**30:.0f} GiB, "
            f"{device.multi_processor_count} multiprocessors, sm_{device.major}{device.minor}"
            for device in devices
        ],
        "driver": first_line("nvidia-smi --query-gpu=driver_version --format=csv,noheader"),
        "nvcc": collect_env.get_running_cuda_version(collect_env.run),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if devices else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in REPORTED},
        "commit": first_line(f"git -C '{directory}' describe --always --dirty"),
        "device_code": device_code(directory),
    }


def device_code(directory: Path) -> str:
    """Return a digest of the kernels and of the code that launches them.

    Pages compare that of a run with today's, to say whether its results are of this code.
    """
    folders = (directory / "csrc" / "packing", directory / "commhooks" / "kernels")
    modules = (directory / "commhooks").rglob("*.py")
    found = {path for folder in folders for path in folder.rglob("*.*") if path.suffix != ".pyc"}
    found |= {path for path in modules if "commhooks.kernels" in path.read_text()}
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(f"{path.relative_to(directory).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str | None:
    for distribution in _distributions(name):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _distributions(name: str) -> tuple[str, ...]:
    """Return the names under which a package may be installed; for CuPy, that of torch's CUDA."""
    if name != "cupy":
        return (name,)
    import torch

    major, _, _ = (torch.version.cuda or "").partition(".")
    return (f"cupy-cuda{major}x", name) if major else (name,)
