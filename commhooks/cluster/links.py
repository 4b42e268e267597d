"""Real links on one machine: hosts in network namespaces, joined by a bridge, at a given rate.

::

    host 0               host 1               host 2
    10.213.0.1           10.213.0.2           10.213.0.3     link0, shaped by `tc tbf`
        └──────────────── bridge ────────────────┘

Needs root and iproute2. Each host sends at most at the rate; what it receives is bounded by what
the others send. The bridge has no address and no way out: packets stay among these hosts.

Note [Links that clean up]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A shell that waits for the end of its input is started first, with the commands that remove
everything. Its input ends when the link is closed, and also when this process is killed. So there
is one way to remove, and nothing that could be forgotten. It runs in a session of its own, which
Ctrl-C does not reach.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commhooks.errors import CommHookError

__all__ = ["Link", "LinkError", "burst_bytes", "shaped_link", "unavailable"]

_INTERFACE = "link0"
_NETWORK = "10.213.0"
_MOST_HOSTS = 250
_BURST_BYTES = 256_000
_BURST_SECONDS = 1e-3  # timers of slow kernels wake this late

_counter = itertools.count()


class LinkError(CommHookError):
    """Links cannot be made on this machine."""


@dataclass(frozen=True)
class Link:
    """Hosts; run a command on host i by putting ``prefixes[i]`` before it."""

    bits_per_second: float
    prefixes: tuple[tuple[str, ...], ...]
    interface: str = _INTERFACE
    address: str = f"{_NETWORK}.1"
    """Of host 0."""

    @property
    def bytes_per_second(self) -> float:
        """Of one direction of one host's link."""
        return self.bits_per_second / 8


def unavailable() -> str | None:
    """Why links cannot be made here, as far as that can be told without trying; None if they can.

    In a container even root may be refused; then :func:`shaped_link` raises LinkError.
    """
    if os.geteuid() != 0:
        return "shaped links need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"shaped links need {tool!r}; install iproute2"
    return None


@contextlib.contextmanager
def shaped_link(world_size: int, bits_per_second: float) -> Iterator[Link]:
    """Hosts that send ``bits_per_second`` each; all are gone afterwards, whatever happens.

    Processes that were started there have to be ended first. Raises LinkError.
    """
    if not 1 <= world_size <= _MOST_HOSTS:
        raise LinkError(f"expected 1 to {_MOST_HOSTS} hosts, found {world_size}")
    if reason := unavailable():
        raise LinkError(reason)
    base = f"ch{os.getpid()}{_letters(next(_counter))}"  # interface names have 15 characters
    hosts = [f"{base}h{index}" for index in range(world_size)]
    with _removed_at_the_end(base, hosts):
        _run("ip", "link", "add", f"{base}b", "type", "bridge")
        _run("ip", "link", "set", f"{base}b", "up")
        for index, host in enumerate(hosts):
            _add_host(base, index, host, bits_per_second)
        prefixes = tuple(("ip", "netns", "exec", host) for host in hosts)
        yield Link(bits_per_second, prefixes)


def burst_bytes(bits_per_second: float) -> float:
    """What a link of this rate sends at once after a pause, at the full speed of the machine."""
    return max(_BURST_BYTES, bits_per_second / 8 * _BURST_SECONDS)


def _add_host(base: str, index: int, host: str, bits_per_second: float) -> None:
    outside = f"{base}v{index}"
    inside = ("peer", "name", _INTERFACE, "netns", host)
    address = f"{_NETWORK}.{index + 1}/24"
    _run("ip", "netns", "add", host)
    _run("ip", "link", "add", outside, "type", "veth", *inside)
    _run("ip", "link", "set", outside, "master", f"{base}b", "up")
    _run("ip", "-n", host, "addr", "add", address, "dev", _INTERFACE)
    _run("ip", "-n", host, "link", "set", _INTERFACE, "up")
    _run("ip", "-n", host, "link", "set", "lo", "up")
    burst = burst_bytes(bits_per_second)
    shape = ("rate", f"{bits_per_second:.0f}bit", "burst", f"{burst:.0f}", "latency", "50ms")
    _run("tc", "-n", host, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *shape)


@contextlib.contextmanager
def _removed_at_the_end(base: str, hosts: Sequence[str]) -> Iterator[None]:
    """See Note [Links that clean up]."""
    commands = [f"ip link delete {base}v{index}" for index in range(len(hosts))]
    commands += [f"ip netns delete {host}" for host in hosts]
    commands += [f"ip link delete {base}b"]
    script = "\n".join(["trap '' HUP INT TERM", "read -r _", *commands])
    remover = subprocess.Popen(
        ["sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert remover.stdin is not None
    try:
        yield
    finally:
        remover.stdin.close()
        remover.wait()


def _run(*command: str) -> None:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise LinkError(
            f"cannot make a shaped link: `{' '.join(command)}` failed: {result.stderr.strip()}"
        )


def _letters(number: int) -> str:
    """0 -> a, 1 -> b, ..., 26 -> ba: digits would run into those of the process."""
    last = chr(ord("a") + number % 26)
    return last if number < 26 else _letters(number // 26) + last
