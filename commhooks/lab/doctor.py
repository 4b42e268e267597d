"""Check this machine: what works, what does not fit together, and what to install."""

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.distributed as dist
from torch.utils import collect_env

from commhooks.cluster.links import LinkError, shaped_link
from commhooks.errors import reason_of
from commhooks.extensions import EXTENSIONS
from commhooks.lab.interfaces import (
    describe_interface,
    gloo_addresses,
    interface_of,
    interfaces,
    is_down,
)
from reducer.extension import ENGINE, REMEDY, Extension

_PYTHON = ((3, 11), (3, 13))
_TORCH = ((2, 11), (2, 15))
_CUPY = "cupy-cuda"
_GRADIENT_BYTES = 1 << 30  # of a model that ranks of a host should have room for

Version = tuple[int, int]

_WITHOUT = {
    "reducer._C": "hooks work on torch's DistributedDataParallel, not on commhooks's own",
    "commhooks._C": "hooks compute on CPU tensors with torch's operations, slower",
}
"""Consequences of a missing extension."""


class Health(Enum):
    """The state of one part."""

    FINE = "fine"
    ABSENT = "absent"
    """Something optional is missing."""
    BROKEN = "broken"


Result = tuple[Health, str] | tuple[Health, str, str]
"""Health, what was found and, if there is one, a remedy."""


@dataclass(frozen=True)
class Finding:
    """The state of one part. ``remedy`` says what to do about it, if anything."""

    part: str
    health: Health
    found: str
    remedy: str = ""


def diagnose() -> list[Finding]:
    """Check all parts. Makes a shaped link for a moment if that is possible."""
    return [Finding(part, *_result_of(check)) for part, check in _checks().items()]


def _result_of(check: Callable[[], Result]) -> Result:
    try:
        return check()
    except Exception as error:  # the other parts are checked
        return Health.BROKEN, f"cannot be checked: {reason_of(error)}"


def _checks() -> dict[str, Callable[[], Result]]:
    return {
        "Python": _python,
        "torch": _torch,
        **{extension.name: partial(_extension, extension) for extension in EXTENSIONS},
        "backends": _backends,
        "Gloo network": _network,
        "CUDA": _cuda,
        "CuPy": _cupy,
        "C++ compiler": _compiler,
        "nvcc": _nvcc,
        "shaped links": _links,
        "host memory": _host_memory,
    }


def _python() -> Result:
    return _versioned(sys.version.split()[0], sys.version_info[:2], _PYTHON, "use one of these")


def _torch() -> Result:
    major, minor = torch.__version__.split(".")[:2]
    remedy = "install one of these, then reinstall commhooks, which is compiled against it"
    return _versioned(torch.__version__, (int(major), int(minor)), _TORCH, remedy)


def _versioned(
    found: str, here: Version, supported: tuple[Version, Version], remedy: str
) -> Result:
    lowest, highest = supported
    if lowest <= here <= highest:
        return Health.FINE, found
    names = " to ".join(f"{major}.{minor}" for major, minor in supported)
    return Health.BROKEN, f"{found}; supported: {names}", remedy


def _extension(extension: Extension) -> Result:
    try:
        extension.load()
    except ImportError as error:  # the remedy is a note of the error
        return Health.BROKEN, str(error), "; ".join(getattr(error, "__notes__", ()))
    if not extension.is_compiled:
        return Health.ABSENT, f"{extension.absence}; {_WITHOUT[extension.name]}", REMEDY
    versions = extension.built_with()
    torch_then, cuda = versions.get("torch"), versions.get("cuda")
    if torch_then is None:
        return Health.FINE, "loads"
    if torch_then.split(".")[:2] != torch.__version__.split(".")[:2]:
        found = f"was compiled against torch {torch_then}, and this is {torch.__version__}"
        return Health.BROKEN, found, REMEDY
    kind = f"CUDA {cuda}" if cuda else "CPU"
    return Health.FINE, f"compiled against torch {torch_then}, for {kind}"


def _backends() -> Result:
    names = [
        name
        for name in ("gloo", "nccl", "mpi", "ucc")
        if dist.is_available() and getattr(dist, f"is_{name}_available")()
    ]
    if "gloo" in names:
        return Health.FINE, ", ".join(names)
    remedy = "install a torch that is built with Gloo, as the published ones are"
    return Health.BROKEN, ", ".join(names) or "none", remedy


def _network() -> Result:
    """Find the interfaces that Gloo takes, and what is likely to be wrong with them."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    is_named = len(chosen) > 1  # torch ignores shorter values
    why = f"GLOO_SOCKET_IFNAME={chosen}" if is_named else f"the host name {socket.gethostname()!r}"
    known = interfaces()
    try:
        used = [(interface_of(address), address) for address in gloo_addresses()]
    except RuntimeError as error:
        remedy = f"set GLOO_SOCKET_IFNAME to interfaces with an address: {_named(known)}"
        return Health.BROKEN, f"Gloo cannot use {why}: {reason_of(error)}", remedy
    found = f"{', '.join(describe_interface(*each) for each in used)}, by {why}"
    names = {name for name, _ in used}
    others = {name: address for name, address in known.items() if name not in names}
    remedy = f"on each host, set GLOO_SOCKET_IFNAME to what reaches the others: {_named(known)}"
    if "lo" in names:
        found += ": ranks on other hosts cannot connect"
        return Health.ABSENT, found, remedy if known else ""
    if any(map(is_down, names)):
        return Health.ABSENT, found, remedy
    if others and not is_named:
        return Health.FINE, found, f"to use another one, set GLOO_SOCKET_IFNAME: {_named(others)}"
    return Health.FINE, found


def _named(interfaces: Mapping[str, str]) -> str:
    return ", ".join(describe_interface(*each) for each in interfaces.items()) or "none here"


def _cuda() -> Result:
    cuda = torch.version.cuda
    if cuda is None:
        return Health.ABSENT, "torch is built for CPU"
    if not torch.cuda.is_available():
        found = f"torch is built for CUDA {cuda}, but finds no device"
        return Health.ABSENT, found, "check whether `nvidia-smi` finds one"
    devices = range(torch.cuda.device_count())
    return Health.FINE, f"{cuda}; {', '.join(map(torch.cuda.get_device_name, devices))}"


def _cupy() -> Result:
    cuda = torch.version.cuda
    wanted = cuda.partition(".")[0] if cuda else None
    packages = _cupy_packages()
    remedy = f"pip install 'commhooks[cuda{wanted}]'" if wanted else ""
    if not packages:
        needed = "kernels for GPUs need it" if wanted else "torch is built for CPU, so not needed"
        return Health.ABSENT, f"not installed; {needed}", remedy
    found = ", ".join(f"{name} {version}" for name, version in packages.items())
    if len(packages) > 1:
        uninstall = f"pip uninstall {' '.join(packages)}" + (f", then {remedy}" if remedy else "")
        return Health.BROKEN, f"{found}: they overwrite each other", uninstall
    (name,) = packages
    major = name.removeprefix(_CUPY).rstrip("x")
    if name.startswith(_CUPY) and wanted is not None and major != wanted:
        mismatch = f"{found} is for CUDA {major}, torch for CUDA {cuda}"
        return Health.BROKEN, mismatch, f"pip uninstall {name}, then {remedy}"
    return Health.FINE, found


def _cupy_packages() -> dict[str, str]:
    """Return the installed packages that provide CuPy, with their versions."""
    names = importlib.metadata.packages_distributions().get("cupy", [])
    return {name.lower(): importlib.metadata.version(name) for name in sorted(set(names))}


def _compiler() -> Result:
    command = os.environ.get("CXX", "c++")
    remedy = "install g++ 11 or newer, or set CXX; only needed to build commhooks"
    path = shutil.which(command)
    if path is None:
        return Health.ABSENT, f"{command!r} not found", remedy
    result = subprocess.run([path, "--version"], check=False, capture_output=True, text=True)
    if result.returncode != 0 or not result.stdout:
        return Health.BROKEN, f"`{path} --version` failed: {result.stderr.strip()}", remedy
    return Health.FINE, result.stdout.splitlines()[0]


def _nvcc() -> Result:
    version = collect_env.get_running_cuda_version(collect_env.run)  # type: ignore[no-untyped-call]
    if version is None:
        remedy = "install the CUDA toolkit; only needed to build for GPUs"
        return Health.ABSENT, "'nvcc' not found, or it does not run", remedy
    return Health.FINE, version


def _links() -> Result:
    try:
        with shaped_link(2, 1e9):
            return Health.FINE, "can be made"
    except LinkError as error:
        return Health.ABSENT, str(error), "`commhooks compare` predicts links instead"


def _host_memory() -> Result:
    """Connect this process with itself."""
    if not ENGINE.is_compiled:
        return Health.ABSENT, "needs the extension reducer._C"
    from reducer.host_memory import room_for  # which fails if the extension is broken
    from reducer.native import HostGroup

    try:
        group = HostGroup()
        group.connect({0: group.address})
        group.check_room(*room_for(_GRADIENT_BYTES, ranks=2, world_size=2))
    except (RuntimeError, OSError) as error:
        return Health.ABSENT, f"{reason_of(error)}; ranks of a host average over the network"
    return Health.FINE, "ranks of this host average through shared memory"
