"""Find out which ranks of a process group share a host, and connect their memory.

Note [Host memory] in csrc/host/host_group.h describes how ranks then average.
"""

import os
import warnings
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
    group: dist.ProcessGroup,
    device: torch.device,
    gradient_bytes: int,
    what: str = "the search for ranks on this host",
) -> HostGroup | None:
    """Connect this rank with those of ``group`` on the same host; return None if it is alone.

    Collective over ``group``. If a rank cannot connect, or a limit leaves it no room for the
    gradients, all ranks return None, and rank 0 warns. ``device``: that of the gradients; only
    those on the CPU are averaged in this way, and only where the backend is Gloo. ``what`` is
    under way, for errors.
    """
    is_wrapped = type(group) is not dist.ProcessGroup  # and may send by other ways than Gloo
    if device.type != "cpu" or group.size() == 1 or is_wrapped or gloo_of(group) is None:
        return None
    own: HostGroup | None = None
    host: tuple[str, ...] = ()
    address, obstacle = None, None
    try:
        host = _identity()
        own = HostGroup()
        address = own.address
    except (RuntimeError, OSError) as error:  # the system may lack what is needed
        obstacle = str(error)
    offers = values_of_ranks((host, address), group, device, what)
    if len({host for host, _ in offers}) == group.size():
        return None
    present = {rank: it for rank, (other, it) in enumerate(offers) if it and other == host}
    if own is not None and len(present) > 1 and all(it for _, it in offers):
        try:
            own.connect(present)
            own.check_room(*room_for(gradient_bytes, len(present), group.size()))
        except (RuntimeError, OSError) as error:
            obstacle = str(error)
    obstacles = values_of_ranks(obstacle, group, device, what)
    failed = [rank for rank, it in enumerate(obstacles) if it is not None]
    if failed and group.rank() == 0:
        warnings.warn(
            f"Ranks {failed} cannot share memory with the other ranks of their host (rank "
            f"{failed[0]}: {obstacles[failed[0]]}), so all ranks average through Gloo, which is "
            "slower. Remove the obstacle, or pass host_memory=False",
            stacklevel=2,
        )
    return own if not failed and own is not None and len(present) > 1 else None


def room_for(gradient_bytes: int, ranks: int, world_size: int) -> tuple[int, int]:
    """Return the bytes that a rank shares and maps at most, if ``ranks`` are on its host."""
    shared = 2 * gradient_bytes  # gradients may be views of the old buckets while these are rebuilt
    # Averaging maps two slices of a peer's buckets, `hierarchical`, for several hosts, the whole.
    peers = min(ranks - 1, 2) if ranks == world_size else ranks - 1
    return shared, shared * (1 + peers)


def _identity() -> tuple[str, ...]:
    """Return what ranks of one host have in common."""
    boot, *namespaces = _IDENTITIES
    return Path(boot).read_text(), *map(os.readlink, namespaces)
