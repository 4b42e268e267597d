"""One rank on NCCL, in this process."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all benchmarks without a CUDA device."""
    if not torch.cuda.is_available():
        absent = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "bench/gpu" in item.path.as_posix():
                item.add_marker(absent)


@pytest.fixture(scope="session")
def group() -> Iterator[dist.ProcessGroup]:
    """Return a NCCL group of world size 1."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
