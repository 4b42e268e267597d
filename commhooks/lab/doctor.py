"""What this machine can do, what does not fit together, and what to install."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.distributed as dist

from commhooks.cluster.links import LinkError, shaped_link
from commhooks.extensions import EXTENSIONS
from reducer.extension import REMEDY, Extension

__all__ = ["Finding", "Health", "diagnose"]

_PYTHON = ((3, 11), (3, 13))
_TORCH = ((2, 11), (2, 15))
_CUPY = "cupy-cuda"

Version = tuple[int, int]


class Health(Enum):
    """Of one part."""

    FINE = "fine"
    ABSENT = "absent"
    """Something optional is not there."""
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """``remedy`` says what to do about it, if anything."""

    part: str
    health: Health
    found: str
    remedy: str = ""


def diagnose() -> list[Finding]:
    """Looks at everything; makes a shaped link for a moment where that can be done."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        *(partial(_extension, extension) for extension in EXTENSIONS),
        _backends,
        _cuda,
        _cupy,
        _compiler,
        _nvcc,
        _links,
    ]
    return [check() for check in checks]


def _python() -> Finding:
    here = sys.version_info[:2]
    return _versioned("Python", sys.version.split()[0], here, _PYTHON, "use one of these")


def _torch() -> Finding:
    major, minor = torch.__version__.split(".")[:2]
    here = int(major), int(minor)
    remedy = "install one of these, then reinstall commhooks, which is compiled against it"
    return _versioned("torch", torch.__version__, here, _TORCH, remedy)


def _extension(extension: Extension) -> Finding:
    try:
        extension.load()
    except ImportError as error:  # the remedy is a note of the error
        remedy = "; ".join(getattr(error, "__notes__", ()))
        return Finding(extension.name, Health.BROKEN, str(error), remedy)
    versions = extension.built_with()
    torch_then, cuda = versions.get("torch"), versions.get("cuda")
    if torch_then is None:
        return Finding(extension.name, Health.FINE, "loads")
    if torch_then.split(".")[:2] != torch.__version__.split(".")[:2]:
        found = f"was compiled against torch {torch_then}, and this is {torch.__version__}"
        return Finding(extension.name, Health.BROKEN, found, REMEDY)
    kind = f"CUDA {cuda}" if cuda else "CPU"
    return Finding(extension.name, Health.FINE, f"compiled against torch {torch_then}, for {kind}")


def _versioned(
    part: str, found: str, here: Version, supported: tuple[Version, Version], remedy: str
) -> Finding:
    lowest, highest = supported
    if lowest <= here <= highest:
        return Finding(part, Health.FINE, found)
    names = " to ".join(f"{major}.{minor}" for major, minor in supported)
    return Finding(part, Health.BROKEN, f"{found}; supported: {names}", remedy)


def _backends() -> Finding:
    there = list(_available_backends())
    if "gloo" in there:
        return Finding("backends", Health.FINE, ", ".join(there))
    return Finding(
        "backends",
        Health.BROKEN,
        ", ".join(there) or "none",
        "install a torch that is built with Gloo, as the published ones are",
    )


def _available_backends() -> Iterator[str]:
    if not dist.is_available():
        return
    for name in ("gloo", "nccl", "mpi", "ucc"):
        if getattr(dist, f"is_{name}_available")():
            yield name


def _cuda() -> Finding:
    if torch.version.cuda is None:
        return Finding("CUDA", Health.ABSENT, "torch is built for CPU")
    if not torch.cuda.is_available():
        return Finding(
            "CUDA",
            Health.ABSENT,
            f"torch is built for CUDA {torch.version.cuda}, but finds no device",
            "see whether `nvidia-smi` finds one",
        )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("CUDA", Health.FINE, f"{torch.version.cuda}; {', '.join(names)}")


def _cupy() -> Finding:
    wanted = torch.version.cuda.partition(".")[0] if torch.version.cuda else None
    packages = _cupy_packages()
    remedy = f"pip install 'commhooks[cuda{wanted}]'" if wanted else ""
    if not packages:
        needed = "kernels for GPUs need it" if wanted else "torch is built for CPU, so not needed"
        return Finding("CuPy", Health.ABSENT, f"not installed; {needed}", remedy)
    found = ", ".join(f"{name} {version}" for name, version in packages.items())
    if len(packages) > 1:
        return Finding(
            "CuPy",
            Health.BROKEN,
            f"{found}: they overwrite each other",
            f"pip uninstall {' '.join(packages)}" + (f", then {remedy}" if remedy else ""),
        )
    (name,) = packages
    major = name.removeprefix(_CUPY).rstrip("x")
    if name.startswith(_CUPY) and wanted is not None and major != wanted:
        return Finding(
            "CuPy",
            Health.BROKEN,
            f"{found} is for CUDA {major}, torch for CUDA {torch.version.cuda}",
            f"pip uninstall {name}, then {remedy}",
        )
    return Finding("CuPy", Health.FINE, found)


def _cupy_packages() -> dict[str, str]:
    """Installed packages that provide CuPy, with their versions."""
    names = importlib.metadata.packages_distributions().get("cupy", [])
    return {name.lower(): importlib.metadata.version(name) for name in sorted(set(names))}


def _compiler() -> Finding:
    command = os.environ.get("CXX", "c++")
    remedy = "install g++ 11 or newer, or set CXX; only needed to build commhooks"
    return _tool("C++ compiler", command, remedy)


def _nvcc() -> Finding:
    return _tool("nvcc", "nvcc", "install the CUDA toolkit; only needed to build for GPUs")


def _tool(part: str, command: str, remedy: str) -> Finding:
    path = shutil.which(command)
    if path is None:
        return Finding(part, Health.ABSENT, f"{command!r} not found", remedy)
    result = subprocess.run([path, "--version"], check=False, capture_output=True, text=True)
    lines = [line for line in result.stdout.splitlines() if any(c.isdigit() for c in line)]
    if result.returncode != 0 or not lines:
        found = f"`{path} --version` failed: {result.stderr.strip()}"
        return Finding(part, Health.BROKEN, found, remedy)
    return Finding(part, Health.FINE, lines[-1 if part == "nvcc" else 0])


def _links() -> Finding:
    try:
        with shaped_link(2, 1e9):
            return Finding("shaped links", Health.FINE, "can be made")
    except LinkError as error:
        remedy = "`commhooks compare` predicts links instead"
        return Finding("shaped links", Health.ABSENT, str(error), remedy)
