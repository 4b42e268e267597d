"""The host time of hooks for CUDA tensors, measured without a GPU and without kernels.

CPU tensors stand for CUDA tensors, and launching a kernel does nothing. Torch's operations run on
the CPU, where products of small matrices take longer than their launch would. This shows the time
of Python; gpu/test_gpu_steps.py measures launches on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.host_time import SUBJECTS, measure
from commhooks import kernels
from commhooks.kernels.source import Source
from reducer import DistributedDataParallel
from reducer.trained_parameters import TrainedParameters


class Nothing:
    """A backend that runs no kernel. Indices that a kernel would write are zeros."""

    def require(self, device: torch.device) -> None:
        """Do nothing: no package is needed."""

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
        """Do nothing but set indices to zero."""
        if "::list<" in kernel:
            values = (ctypes.POINTER(ctypes.c_int64) * count).from_address(parameters)
            length, indices = (values[i].contents.value for i in (3, 4))
            ctypes.memset(indices, 0, 4 * length)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """Return a group of world size 1, on one thread."""
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
    """Measure as on a GPU, with CPU tensors."""
    monkeypatch.setitem(kernels.BACKENDS, "cpu", Nothing())
    measure(benchmark, name, "cpu", group, settle=lambda: None)


@pytest.mark.benchmark(group="host: has the module changed since it was wrapped?")
@pytest.mark.parametrize("frozen", [0, 1000])
def test_comparison_of_parameters(benchmark: Any, group: dist.ProcessGroup, frozen: int) -> None:
    """Measure the comparison before each forward, of 2000 parameters; at most 20 microseconds."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1000)))
    for layer in net[: frozen // 2]:
        layer.requires_grad_(False)
    model = DistributedDataParallel(net, process_group=group)
    trained = TrainedParameters(model)
    net[-1].weight.data = net[-1].weight.data.double()
    with pytest.raises(RuntimeError, match=r"is torch\.float64"):
        trained.check(model)
    net[-1].weight.data = net[-1].weight.data.float()
    trained.check(model)
    benchmark.pedantic(trained.check, (model,), rounds=2000, iterations=5, warmup_rounds=10)
