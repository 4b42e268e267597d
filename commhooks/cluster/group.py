"""The default process group of rank processes, and the devices that they take."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

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
    *,
    backend: str = "gloo",
    hosts_store: bool = False,
) -> None:
    """Join the default process group whose store is at ``address``; return when all ranks have.

    Args:
        rank: of this process.
        world_size: number of ranks.
        address: host name or IP address of the store.
        port: TCP port of the store.
        timeout: of each collective, and of connecting, in seconds.
        backend: "gloo" or "nccl"; with "nccl", each rank takes a CUDA device: :func:`take_device`.
        hosts_store: whether this rank hosts the store.
    """
    seconds = timedelta(seconds=timeout)
    store = TCPStore(address, port, is_master=hosts_store, timeout=seconds, wait_for_workers=False)
    if family_named(backend) == NCCL:
        take_device(rank, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=seconds)
    if backend == GLOO:
        dist.barrier()  # a rank that leaves before another one has connected makes that one fail


def take_device(rank: int, world_size: int) -> None:
    """Use CUDA device ``rank`` modulo their number in this process. Call it before NCCL is used.

    NCCL refuses two ranks of one host on the same device. If there are fewer devices than ranks,
    each rank therefore says that it is a host of its own (``NCCL_HOSTID``), and NCCL sends through
    sockets. This shows that results and order are right. It shows no times of NVLink, and ranks
    take turns on the device: a small collective takes 5 ms with 2 ranks, 27 ms with 4 (one H200).

    Raises RuntimeError if there is no device.
    """
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError(
            f"[rank {rank}] NCCL needs a CUDA device, and torch {torch.__version__} finds none; "
            "use the backend 'gloo'"
        )
    if world_size > count:
        os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}, rank {rank}")
        os.environ.setdefault("NCCL_MNNVL_ENABLE", "0")
    torch.cuda.set_device(rank % count)
