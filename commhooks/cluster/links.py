"""Links of a given rate on one machine: hosts are network namespaces joined by a bridge.

::

    host 0               host 1               host 2
    10.213.0.1           10.213.0.2           10.213.0.3     link0, shaped by `tc tbf`
        └──────────────── bridge ────────────────┘

Needs root and iproute2. The rate limits what a host sends; what it receives is limited by what the
others send. The bridge has no address and no uplink, so packets stay between these hosts. Ranks of
one host share its link, and send to each other over loopback.

Note [Links that clean up]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Before any namespace is made, a shell is started that waits for the end of its input and then runs
the commands that remove everything. Its input ends when the link is closed, and also when this
process is killed, so there is a single clean-up path. The shell runs in its own session, so Ctrl-C
does not reach it.
"""

import contextlib
import itertools
import os
import shutil
import string
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commhooks.errors import CommHookError

_INTERFACE = "link0"
_NETWORK = "10.213.0"
_MAX_HOSTS = 250
_BURST_SECONDS = 1e-3  # latency of the kernel's timers
_BURST_BYTES = 8_000  # a few packets
_PACKET_BYTES = 12_000, 65_536
"""Smaller packets take much of the cores; while one of a whole burst waits, time is lost."""

_counter = itertools.count()


class LinkError(CommHookError):
    """Shaped links cannot be made on this machine."""


@dataclass(frozen=True)
class ShapedLink:
    """Hosts joined by a link; put ``prefixes[i]`` before a command to run it as rank i."""

    prefixes: tuple[tuple[str, ...], ...]
    interface: str = _INTERFACE
    address: str = f"{_NETWORK}.1"
    """The IP address of host 0."""

    @property
    def hosts(self) -> list[str]:
        """The network namespaces of the ranks."""
        return [prefix[-1] for prefix in self.prefixes]


def unavailable() -> str | None:
    """Return why shaped links cannot be made here, or None if nothing is known to be missing.

    In a container even root may lack the permission; then :func:`shaped_link` raises LinkError.
    """
    if os.geteuid() != 0:
        return "shaped links need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"shaped links need {tool!r}; install iproute2"
    return None


@contextlib.contextmanager
def shaped_link(
    world_size: int, bits_per_second: float, *, ranks_per_host: int = 1
) -> Iterator[ShapedLink]:
    """Make hosts that send ``bits_per_second`` each, and remove them at the end.

    Host i is that of the i-th ``ranks_per_host`` ranks. All are removed even if this process is
    killed. End the processes on them first.

    Raises:
        LinkError: the hosts cannot be made.
    """
    if world_size % ranks_per_host != 0:
        raise LinkError(f"expected {ranks_per_host} ranks on each host, found {world_size} in all")
    if not 1 <= world_size // ranks_per_host <= _MAX_HOSTS:
        raise LinkError(f"expected 1 to {_MAX_HOSTS} hosts, found {world_size // ranks_per_host}")
    if reason := unavailable():
        raise LinkError(reason)
    # Interface names have 15 characters. A digit would run into those of the process ID.
    base = f"ch{os.getpid()}{string.ascii_lowercase[next(_counter) % 26]}"
    hosts = [f"{base}h{index}" for index in range(world_size // ranks_per_host)]
    with _removal(base, hosts):
        _run("ip", "link", "add", f"{base}b", "type", "bridge")
        _run("ip", "link", "set", f"{base}b", "up")
        burst = burst_bytes(bits_per_second)
        rate = ("rate", f"{bits_per_second:.0f}bit", "burst", f"{burst:.0f}", "latency", "50ms")
        least, most = _PACKET_BYTES
        largest = str(round(min(burst, max(burst / 2, least), most)))
        for index, host in enumerate(hosts):
            outside, inside = f"{base}v{index}", ("peer", "name", _INTERFACE, "netns", host)
            address = f"{_NETWORK}.{index + 1}/24"
            _run("ip", "netns", "add", host)
            _run("ip", "link", "add", outside, "type", "veth", *inside)
            _run("ip", "link", "set", outside, "master", f"{base}b", "up")
            _run("ip", "-n", host, "addr", "add", address, "dev", _INTERFACE)
            _run("ip", "-n", host, "link", "set", _INTERFACE, "up", "gso_max_size", largest)
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("tc", "-n", host, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *rate)
        of_ranks = [host for host in hosts for _ in range(ranks_per_host)]
        prefixes = tuple(("ip", "netns", "exec", host) for host in of_ranks)
        yield ShapedLink(prefixes)


def burst_bytes(bits_per_second: float) -> float:
    """Return how many bytes a link of this rate sends unshaped after a pause, as in each step."""
    return max(_BURST_BYTES, bits_per_second / 8 * _BURST_SECONDS)


@contextlib.contextmanager
def _removal(base: str, hosts: Sequence[str]) -> Iterator[None]:
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
