"""The host's time for hooks on their way for GPUs, where there is none: kernels are left out.

CPU tensors are taken for those of a GPU, and launching a kernel does nothing. Torch's operations do
what they do on a CPU: products of small matrices then take longer than their launch would. What
launching costs is for a GPU to tell, see gpu/test_gpu_steps.py; this shows what Python does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.host_time import SUBJECTS, measure
from commhooks import kernels
from commhooks.kernels.source import Source


class Nothing:
    """Runs no kernel. Indices that one would have listed are zeros, as torch looks at them."""

    def require(self, device: torch.device) -> None:
        """There is nothing to install."""

    def launch(
        self,
        source: Source,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: int,
        count: int,
        device_index: int,
    ) -> None:
        """See above."""
        if "::list<" in kernel:
            values = (ctypes.POINTER(ctypes.c_int64) * count).from_address(parameters)
            length, indices = (values[i].contents.value for i in (3, 4))
            ctypes.memset(indices, 0, 4 * length)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """World size 1, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.benchmark(group="host: Python per bucket and hook, without kernels")
@pytest.mark.parametrize("name", SUBJECTS)
def test_host_time(
    benchmark: Any, group: dist.ProcessGroup, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the device."""
    monkeypatch.setitem(kernels.BACKENDS, "cpu", Nothing())
    measure(benchmark, name, "cpu", group, settle=lambda: None)
