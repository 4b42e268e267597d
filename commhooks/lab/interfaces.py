"""The network interfaces of this machine, and the addresses that Gloo takes. Linux only."""

import fcntl
import ipaddress
import os
import socket
import struct
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from commhooks.lab.units import format_rate

__all__ = ["describe_interface", "gloo_addresses", "interface_of", "interfaces", "is_down"]

_SIOCGIFADDR = 0x8915  # of linux/sockios.h
_SYSTEM = Path("/sys/class/net")


def gloo_addresses() -> list[str]:
    """Return the addresses at which torch's Gloo backend listens here, one per connection.

    Makes a process group of this process alone, so that torch itself chooses. Raises RuntimeError
    if it cannot.
    """
    before = _listening()
    group = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
    found = [address for socket_, address in _listening().items() if socket_ not in before]
    del group
    return found


def interfaces() -> dict[str, str]:
    """Return the addresses of the interfaces that have one, without loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return {name: address for name, address in (_ipv6() | found).items() if not _is_local(address)}


def interface_of(address: str) -> str:
    """Return the name of the interface with an address: "lo" for loopback, else "" if unknown."""
    if _is_local(address):
        return "lo"
    known = {address: name for name, address in (*_ipv6().items(), *interfaces().items())}
    return known.get(address, "")


def describe_interface(name: str, address: str) -> str:
    """Return the name, the address and, if the system tells them, the rate and that it is down."""
    parts = [address]
    if (speed := _read(name, "speed")).isdigit() and int(speed) > 0:
        parts.append(format_rate(1e6 * int(speed)))
    if is_down(name):
        parts.append("down")
    return f"{name} ({', '.join(parts)})"


def is_down(name: str) -> bool:
    """Return whether the system says that an interface has no link."""
    return _read(name, "operstate") in ("down", "lowerlayerdown")


def _ipv6() -> dict[str, str]:
    """Return the global IPv6 addresses by interface; one for each."""
    path = Path("/proc/net/if_inet6")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = (line.split() for line in lines)
    return {
        name: str(ipaddress.IPv6Address(bytes.fromhex(digits)))
        for digits, _, _, scope, _, name in fields
        if scope == "00"
    }


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _read(name: str, file: str) -> str:
    try:
        return (_SYSTEM / name / file).read_text().strip()
    except OSError:
        return ""


def _listening() -> dict[str, str]:
    """Return the addresses at which this process listens, by socket, in the order of opening."""
    found = {}
    for path in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
        try:
            link = str(path.readlink())
        except OSError:  # the descriptor of the folder
            continue
        if not link.startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(path.name))) as copy:
            is_internet = copy.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[link] = copy.getsockname()[0]
    return found
