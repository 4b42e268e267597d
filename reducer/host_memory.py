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
    own, identity = _open(group)
    what = "the search for ranks on this host"
    card = None if own is None else own.card
    found = values_of_ranks((identity, card), group, device, what)
    identities = {of for of, _ in found}
    if len(identities) > 1 or None in identities:
        return None
    assert own is not None
    try:
        own.connect([card for _, card in found])
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


def _open(group: dist.ProcessGroup) -> tuple[HostGroup | None, tuple[str, ...] | None]:
    """Return what this rank offers to others, and what they must have in common with it."""
    if sys.platform != "linux":
        return None, None
    try:
        boot, *namespaces = _IDENTITIES
        identity = (Path(boot).read_text(), *map(os.readlink, namespaces))
        return HostGroup(group.rank(), group.size()), identity
    except (RuntimeError, OSError):
        return None, None
