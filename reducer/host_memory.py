"""Find out whether all ranks of a process group share a host, and connect their memory.

Note [Host memory] in csrc/host/host_group.h describes how ranks then average.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from reducer.agreement import values_of_ranks
from reducer.extension import ENGINE
from reducer.native import HostGroup

__all__: list[str] = []

# What processes must have in common: the kernel, the network, and the numbers of processes. Ranks
# with networks of their own are taken for hosts of their own.
_IDENTITIES = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/pid")


def connect_host(group: dist.ProcessGroup, device: torch.device) -> HostGroup | None:
    """Connect the ranks of ``group`` if they share a host; otherwise return None, on all ranks.

    Collective over ``group``. ``device``: that of the gradients; only those on the CPU are averaged
    in this way, and only where the backend is Gloo.
    """
    if device.type != "cpu" or group.size() == 1 or not _uses_gloo(group):
        return None
    what = "the search for ranks on this host"
    own = _open(group)
    offers = values_of_ranks(own and (_identity(), own.card), group, device, what)
    present = [offer for offer in offers if offer is not None]
    if own is None or len(present) < len(offers) or len({identity for identity, _ in present}) > 1:
        return None
    try:
        own.connect([card for _, card in present])
        is_connected = True
    except (RuntimeError, OSError):
        is_connected = False
    return own if all(values_of_ranks(is_connected, group, device, what)) else None


def _uses_gloo(group: dist.ProcessGroup) -> bool:
    if type(group) is not dist.ProcessGroup or not ENGINE.is_compiled:
        return False
    try:
        backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001
    except RuntimeError:
        return False
    return isinstance(backend, ProcessGroupGloo)


def _open(group: dist.ProcessGroup) -> HostGroup | None:
    """Return this rank's part of the group, or None if the system lacks what is needed."""
    if sys.platform != "linux":
        return None
    try:
        return HostGroup(group.rank(), group.size())
    except (RuntimeError, OSError):
        return None


def _identity() -> tuple[str, ...]:
    """Return what ranks of one host have in common."""
    boot, *namespaces = _IDENTITIES
    return Path(boot).read_text(), *map(os.readlink, namespaces)
