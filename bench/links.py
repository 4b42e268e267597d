"""Hosts on one machine: network namespaces joined by a bridge, each with a shaped link.

Needs root and iproute2. Each host sends at most `rate`; what it receives is bounded by what the
others send. Everything is removed at the end, also of runs that were killed: names begin with the
pid of the process that made them, and leftovers of dead processes are removed at the next start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "chb"  # names of interfaces have at most 15 characters
SUBNET = "10.213.0"
INTERFACE = "link0"


@dataclass(frozen=True)
class Link:
    """`world_size` hosts; run a command on host i by putting ``prefixes[i]`` before it."""

    bits_per_second: float
    prefixes: tuple[tuple[str, ...], ...]
    interface: str = INTERFACE

    @property
    def bytes_per_second(self) -> float:
        """Of one direction of one host's link."""
        return self.bits_per_second / 8


def unavailable() -> str | None:
    """Why links cannot be made here; `None` if they can."""
    if os.geteuid() != 0:
        return "shaped links need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"shaped links need iproute2's `{tool}`"
    return None


@contextlib.contextmanager
def shaped_link(world_size: int, rate_mbit: int) -> Iterator[Link]:
    """Hosts that send `rate_mbit` Mbit/s each."""
    _remove_leftovers()
    base = f"{PREFIX}{os.getpid()}"
    bridge = f"{base}b"
    hosts = [f"{base}h{index}" for index in range(world_size)]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for index, host in enumerate(hosts):
            outside = f"{base}v{index}"
            _run("ip", "netns", "add", host)
            _run(
                "ip",
                "link",
                "add",
                outside,
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                host,
            )
            _run("ip", "link", "set", outside, "master", bridge, "up")
            address = f"{SUBNET}.{index + 1}/24"
            _run("ip", "-n", host, "addr", "add", address, "dev", INTERFACE)
            _run("ip", "-n", host, "link", "set", INTERFACE, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            shape = ["tbf", "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", host, "qdisc", "add", "dev", INTERFACE, "root", *shape)
        prefixes = tuple(("ip", "netns", "exec", host) for host in hosts)
        yield Link(rate_mbit * 1e6, prefixes)
    finally:
        _remove(base)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _names(*command: str) -> list[str]:
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listing.splitlines() if line.strip()]


def _remove(base: str) -> None:
    """Remove the namespaces (their interfaces go with them) and the bridge of `base`."""
    for host in _names("ip", "netns", "list"):
        if host.startswith(f"{base}h"):
            subprocess.run(["ip", "netns", "delete", host], check=False, capture_output=True)
    subprocess.run(["ip", "link", "delete", f"{base}b"], check=False, capture_output=True)


def _remove_leftovers() -> None:
    for host in _names("ip", "netns", "list"):
        owner = host.removeprefix(PREFIX).split("h")[0]
        is_ours = host.startswith(PREFIX) and owner.isdigit()
        if is_ours and not Path(f"/proc/{owner}").exists():
            _remove(f"{PREFIX}{owner}")
