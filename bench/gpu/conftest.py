"""One rank on NCCL, in this process."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    """Skip all benchmarks without a CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def group() -> Iterator[dist.ProcessGroup]:
    """Return a NCCL group of world size 1."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
