"""Find out which ranks of a process group share a host, and connect their memory.

Note [Host memory] in csrc/host/host_group.h describes how ranks then average.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from reducer.agreement import values_of_ranks
from reducer.native import HostGroup
from reducer.peers import gloo_of

# What processes must have in common: the kernel, the network, and the numbers of processes. Ranks
# with networks of their own are taken for hosts of their own.
_IDENTITIES = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/pid")


def connect_host(
    group: dist.ProcessGroup, device: torch.device, what: str = "the search for ranks on this host"
) -> HostGroup | None:
    """Connect this rank with those of ``group`` on the same host; return None if it is alone.

    Collective over ``group``. If a rank cannot connect, all ranks return None. ``device``: that of
    the gradients; only those on the CPU are averaged in this way, and only where the backend is
    Gloo. ``what`` is under way, for errors.
    """
    is_wrapped = type(group) is not dist.ProcessGroup  # and may send by other ways than Gloo
    if device.type != "cpu" or group.size() == 1 or is_wrapped or gloo_of(group) is None:
        return None
    own: HostGroup | None = None
    with suppress(RuntimeError, OSError):  # the system may lack what is needed
        own = HostGroup()
    offer = None if own is None else (_identity(), own.address)
    offers = values_of_ranks(offer, group, device, what)
    present = {rank: it for rank, it in enumerate(offers) if it is not None}
    is_connected = False
    if own is not None and offer is not None and len(present) == len(offers):
        with suppress(RuntimeError, OSError):
            own.connect({rank: it for rank, (host, it) in present.items() if host == offer[0]})
            is_connected = True
    are_connected = all(values_of_ranks(is_connected, group, device, what))
    return own if own is not None and are_connected and len(own.ranks) > 1 else None


def _identity() -> tuple[str, ...]:
    """Return what ranks of one host have in common."""
    boot, *namespaces = _IDENTITIES
    return Path(boot).read_text(), *map(os.readlink, namespaces)
