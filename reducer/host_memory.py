"""Find out which ranks of a process group share a host, and connect their memory.

Note [Host memory] in csrc/host/host_group.h describes how ranks then average.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
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
    """Connect this rank with those of ``group`` on the same host; return None if it is alone.

    Collective over ``group``. If a rank cannot connect, all ranks return None. ``device``: that of
    the gradients; only those on the CPU are averaged in this way, and only where the backend is
    Gloo.
    """
    if device.type != "cpu" or group.size() == 1 or not _uses_gloo(group):
        return None
    what = "the search for ranks on this host"
    own, identity = _open(), _identity()
    offers = values_of_ranks(own and (identity, own.address), group, device, what)
    present = {rank: offer for rank, offer in enumerate(offers) if offer is not None}
    is_connected = False
    if own is not None and len(present) == len(offers):
        with suppress(RuntimeError, OSError):
            own.connect(
                {rank: address for rank, (of, address) in present.items() if of == identity}
            )
            is_connected = True
    are_connected = all(values_of_ranks(is_connected, group, device, what))
    return own if own is not None and are_connected and len(own.ranks) > 1 else None


def _uses_gloo(group: dist.ProcessGroup) -> bool:
    if type(group) is not dist.ProcessGroup or not ENGINE.is_compiled:
        return False
    try:
        backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001
    except RuntimeError:
        return False
    return isinstance(backend, ProcessGroupGloo)


def _open() -> HostGroup | None:
    """Return memory to share, or None if the system lacks what is needed."""
    if sys.platform != "linux":
        return None
    try:
        return HostGroup()
    except (RuntimeError, OSError):
        return None


def _identity() -> tuple[str, ...]:
    """Return what ranks of one host have in common."""
    if sys.platform != "linux":
        return ()
    boot, *namespaces = _IDENTITIES
    return Path(boot).read_text(), *map(os.readlink, namespaces)
