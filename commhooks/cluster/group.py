"""The default process group of rank processes."""

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from commhooks.cluster.device import take_device
from reducer.backends import GLOO, NCCL, family_named


def local_store() -> TCPStore:
    """Host a store for :func:`join_group` in this process, on a free port of the loopback."""
    # On a socket that it opens itself, it sees peers as ::ffff:127.0.0.1, and asks a name server
    # who that is, which can take seconds.
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # which the store closes
    )


def join_group(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    timeout: float,
    backend: str = "gloo",
    hosts: Sequence[str] = (),
) -> None:
    """Join the default process group whose store is at ``address``; return when all ranks have.

    Args:
        rank: of this process.
        world_size: number of ranks.
        address: host name or IP address of the store.
        port: TCP port of the store.
        timeout: of each collective, and of connecting, in seconds.
        backend: "gloo" or "nccl"; with "nccl", each rank takes a CUDA device: :func:`take_device`.
        hosts: the network namespaces of the ranks, if they are in some; rank 0 then hosts the
            store, because its parent is in none of them.
    """
    seconds = timedelta(seconds=timeout)
    is_master = bool(hosts) and rank == 0
    store = TCPStore(address, port, is_master=is_master, timeout=seconds, wait_for_workers=False)
    if family_named(backend) == NCCL:
        take_device(rank, world_size, hosts[rank] if hosts else None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=seconds)
    if backend == GLOO:
        dist.barrier()  # a rank that leaves before another one has connected makes that one fail
