"""The process of one rank: ``python -m bench.rank ADDRESS RANK WORLD_SIZE``."""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client

import torch
import torch.distributed as dist


def main() -> None:
    """Serve calls until the other side closes the connection."""
    address, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    with Client(address, "AF_UNIX") as connection:
        connection.recv()
        store = dist.FileStore(f"{address}.store", world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                break
            try:
                connection.send((True, function(rank, *arguments)))
            except Exception:
                connection.send((False, traceback.format_exc()))
    # Peers may be gone already; leaving in order is not worth waiting for them.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
