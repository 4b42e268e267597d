"""Check this machine: what works, what does not fit together, and what to install."""

import ipaddress
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from commhooks.cluster.links import LinkError, shaped_link
from commhooks.costs.units import format_rate
from commhooks.errors import CommHookError, reason_of
from commhooks.extensions import EXTENSIONS
from reducer.extension import ENGINE, REMEDY, Extension

_PYTHON, _TORCH = ("3.11", "3.13"), ("2.11", "2.15")
_GRADIENT_BYTES = 1 << 30  # of a model that ranks of a host should have room for
_WITHOUT = {
    "reducer._C": "hooks work on torch's DistributedDataParallel, not on commhooks's own",
    "commhooks._C": "hooks compute on CPU tensors with torch's operations, slower",
}
"""Consequences of a missing extension."""


class Health(Enum):
    """The state of one part. What is absent is optional."""

    FINE = "fine"
    ABSENT = "absent"
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
    findings = []
    for part, check in _checks().items():
        try:
            result = check()
        except Exception as error:  # the other parts are checked
            result = Health.BROKEN, f"cannot be checked: {reason_of(error)}"
        findings.append(Finding(part, *result))
    return findings


def _checks() -> dict[str, Callable[[], Result]]:
    reinstall = "install one of these, then reinstall commhooks, which is compiled against it"
    install = "install g++ 11 or newer, or set CXX; only needed to build commhooks"
    toolkit = "install the CUDA toolkit; only needed to build for GPUs"
    return {
        "Python": partial(_version, sys.version.split()[0], _PYTHON, "use one of these"),
        "torch": partial(_version, torch.__version__, _TORCH, reinstall),
        **{extension.name: partial(_extension, extension) for extension in EXTENSIONS},
        "backends": _backends,
        "Gloo network": _gloo_interfaces,
        "CUDA": _cuda,
        "CuPy": _cupy,
        "C++ compiler": partial(_compiler, os.environ.get("CXX", "c++"), install),
        "nvcc": partial(_compiler, "nvcc", toolkit),
        "shaped links": _links,
        "host memory": _host_memory,
    }


def _version(found: str, supported: tuple[str, str], remedy: str) -> Result:
    lowest, here, highest = (
        [int(number) for number in re.findall(r"\d+", version)[:2]]
        for version in (supported[0], found, supported[1])
    )
    if lowest <= here <= highest:
        return Health.FINE, found
    return Health.BROKEN, f"{found}; supported: {' to '.join(supported)}", remedy


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
    every = ("gloo", "nccl", "mpi", "ucc") if dist.is_available() else ()
    names = [name for name in every if getattr(dist, f"is_{name}_available")()]
    if "gloo" in names:
        return Health.FINE, ", ".join(names)
    remedy = "install a torch that is built with Gloo, as the published ones are"
    return Health.BROKEN, ", ".join(names) or "none", remedy


def _gloo_interfaces() -> Result:
    """Name the interfaces that Gloo takes, and those that it can take."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    is_named = len(chosen) > 1  # torch ignores shorter values
    why = f"GLOO_SOCKET_IFNAME={chosen}" if is_named else f"the host name {socket.gethostname()!r}"
    name_of = {
        each.address: name
        for family in (socket.AF_INET6, socket.AF_INET)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == family and not ipaddress.ip_address(each.address).is_link_local
    }
    # One address of each, IPv4 if possible, without loopback.
    known = {name: address for address, name in name_of.items() if not _is_local(address)}
    choices = ", ".join(map(_described, known, known.values())) or "none here"
    remedy = f"on each host, set GLOO_SOCKET_IFNAME to what reaches the others: {choices}"
    try:
        addresses = _gloo_addresses()
    except RuntimeError as error:
        return Health.BROKEN, f"Gloo cannot use {why}: {reason_of(error)}", remedy
    used = [("lo" if _is_local(each) else name_of.get(each, "?"), each) for each in addresses]
    found = f"{', '.join(_described(*each) for each in used)}, by {why}"
    if "lo" in dict(used):
        found += ": ranks on other hosts cannot connect"
        return Health.ABSENT, found, remedy if known else ""
    return Health.FINE, found, remedy if len(known) > 1 and not is_named else ""


def _described(interface: str, address: str) -> str:
    """Return name and address and, if the system tells it, the rate."""
    stats = psutil.net_if_stats().get(interface)
    rate = f", {format_rate(1e6 * stats.speed)}" if stats is not None and stats.speed > 0 else ""
    return f"{interface} ({address}{rate})"


def _gloo_addresses() -> list[str]:
    """Return the addresses at which torch's Gloo backend listens here, one per connection.

    Makes a process group of this process alone, so that torch itself chooses. Raises RuntimeError
    if it cannot.
    """
    before = _listening()
    group = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
    found = [address for file, address in sorted(_listening().items()) if file not in before]
    del group
    return found


def _listening() -> dict[int, str]:
    """Return the addresses at which this process listens, by file descriptor."""
    every = psutil.Process().net_connections("inet")
    return {each.fd: each.laddr.ip for each in every if each.status == psutil.CONN_LISTEN}


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


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
    if torch.version.cuda is None:
        return Health.ABSENT, "torch is built for CPU, so not needed"
    from commhooks.kernels import require  # which fails if an extension is broken

    try:
        require(torch.device("cuda"))
    except CommHookError as error:
        found, _, remedy = str(error).rpartition(": ")
        return Health.BROKEN if find_spec("cupy") else Health.ABSENT, found, remedy
    return Health.FINE, f"{import_module('cupy').__version__}, for the CUDA version of torch"


def _compiler(command: str, remedy: str) -> Result:
    words = shlex.split(command) or [""]  # as "ccache g++"
    path = shutil.which(words[0])
    if path is None:
        return Health.ABSENT, f"{words[0]!r} not found", remedy
    words = [path, *words[1:]]
    result = subprocess.run([*words, "--version"], check=False, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    if result.returncode != 0 or not lines:
        return (
            Health.BROKEN,
            f"`{shlex.join(words)} --version` failed: {result.stderr.strip()}",
            remedy,
        )
    return Health.FINE, next((line for line in lines if "release" in line), lines[0])  # of nvcc


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
