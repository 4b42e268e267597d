"""What torchrun tells each rank, for libraries that read it."""

import os


def set_environment(rank: int, size: int) -> None:
    """Set torchrun's variables, for one call of ``run_ranks``, which has made the process group."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nothing connects
        "OMP_NUM_THREADS": "1",
    }
