"""What torchrun tells each rank, for libraries that read it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def launched(rank: int, size: int) -> Iterator[None]:
    """Set torchrun's variables. Nothing connects: ``run_ranks`` has made the process group."""
    before = dict(os.environ)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
