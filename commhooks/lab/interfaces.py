"""The network interfaces of this machine, and the addresses that Gloo takes."""

import ipaddress
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from commhooks.costs.units import format_rate


def gloo_addresses() -> list[str]:
    """Return the addresses at which torch's Gloo backend listens here, one per connection.

    Makes a process group of this process alone, so that torch itself chooses. Raises RuntimeError
    if it cannot.
    """
    before = _listening()
    group = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
    found = [address for file, address in sorted(_listening().items()) if file not in before]
    del group
    return found


def interfaces() -> dict[str, str]:
    """Return one address of each interface that has one, IPv4 if possible, without loopback."""
    return {
        name: address
        for family in (socket.AF_INET6, socket.AF_INET)
        for name, address in _addresses(family)
        if not _is_local(address)
    }


def interface_of(address: str) -> str:
    """Return the name of the interface with an address: "lo" for loopback, else "" if unknown."""
    if _is_local(address):
        return "lo"
    known = (*_addresses(socket.AF_INET6), *_addresses(socket.AF_INET))
    return next((name for name, other in known if other == address), "")


def describe_interface(name: str, address: str) -> str:
    """Return the name, the address and, if the system tells them, the rate and that it is down."""
    parts = [address]
    stats = psutil.net_if_stats().get(name)
    if stats is not None and stats.speed > 0:
        parts.append(format_rate(1e6 * stats.speed))
    if is_down(name):
        parts.append("down")
    return f"{name} ({', '.join(parts)})"


def is_down(name: str) -> bool:
    """Return whether the system says that an interface has no link."""
    stats = psutil.net_if_stats().get(name)
    return stats is not None and not stats.isup


def _addresses(family: socket.AddressFamily) -> list[tuple[str, str]]:
    """Return the names of interfaces and their addresses, without those of a link only."""
    return [
        (name, each.address)
        for name, of_interface in psutil.net_if_addrs().items()
        for each in of_interface
        if each.family == family and not ipaddress.ip_address(each.address).is_link_local
    ]


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _listening() -> dict[int, str]:
    """Return the addresses at which this process listens, by file descriptor."""
    return {
        each.fd: each.laddr.ip
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
