"""The machine of a run, and whether a run is possible."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

# Import names, and the purpose of each.
NEEDED = {
    "torch": "everything",
    "numpy": "the kernels' tests",
    "pytest": "the tests",
    "setuptools>=77": "the build",
}
WANTED = {
    "pytest_benchmark": "the benchmarks",
    "ninja": "a parallel build",
    "cupy": "the kernels of hooks",
}
DISTRIBUTIONS = ("torch", "numpy", "pytest", "pytest-benchmark", "ninja")


def missing(names: dict[str, str]) -> list[str]:
    """Return the packages that this Python lacks, or has too old, with their purpose."""
    return [f"{name} ({purpose})" for name, purpose in names.items() if not _is_there(name)]


def _is_there(requirement: str) -> bool:
    name, _, least = requirement.partition(">=")
    if importlib.util.find_spec(name) is None:
        return False
    return not least or int((_version(name) or "0").partition(".")[0]) >= int(least)


def find_sanitizer() -> str | None:
    """Find compute-sanitizer, also beside an nvcc that is not on the PATH."""
    if found := shutil.which("compute-sanitizer"):
        return found
    home = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    path = home / "bin" / "compute-sanitizer"
    return str(path) if path.exists() else None


def describe(directory: Path) -> dict[str, object]:
    """Return the machine, the driver, versions and the commit, as JSON types."""
    import torch

    versions = {name: _version(name) for name in DISTRIBUTIONS}
    versions["cupy"] = next(
        (f"{name} {found}" for name in _cupy_names() if (found := _version(name))), None
    )
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "devices": [
            f"{device.name}, {device.total_memory / 2**30:.0f} GiB, "
            f"{device.multi_processor_count} multiprocessors, sm_{device.major}{device.minor}"
            for device in devices
        ],
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": _first_line("nvcc", "--version", last=True),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if devices else None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions,
        "commit": _first_line("git", "-C", str(directory), "rev-parse", "--short=12", "HEAD"),
    }


def _cupy_names() -> tuple[str, ...]:
    return ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str, last: bool = False) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    lines = run.stdout.strip().splitlines()
    return lines[-1 if last else 0] if lines and run.returncode == 0 else None
