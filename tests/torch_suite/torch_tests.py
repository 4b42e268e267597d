"""torch's own tests of DistributedDataParallel, made to run any wrapper on Gloo and the CPU."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing._internal import common_distributed

import commhooks
from torch_suite.cuda_on_cpu import cuda_on_cpu

RANKS = 2
# Read when torch's tests are imported.
os.environ |= {
    "BACKEND": "gloo",
    "WORLD_SIZE": str(RANKS),
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",  # seconds per test
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
}


def run_always(test: Any) -> Any:
    """Replace a decorator that skips a test if there are not enough GPUs."""
    return test


with mock.patch.multiple(
    common_distributed,
    skip_if_no_gpu=run_always,
    skip_if_lt_x_gpu=lambda *_, **__: run_always,
):
    from torch.testing._internal.distributed import distributed_test


class OnCpu:
    """Mixin for wrappers: ignores the devices that tests name."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, None, None, *args, **kwargs)


class TorchOnCpu(OnCpu, TorchDDP):
    """torch's wrapper."""


class OursOnCpu(OnCpu, commhooks.DistributedDataParallel):
    """The wrapper under test."""


@contextmanager
def replaced_by(wrapper: type[nn.Module]) -> Iterator[None]:
    """Return a context in which torch's wrapper is another class, for tests and libraries."""
    with (
        mock.patch.object(nn.parallel, "DistributedDataParallel", wrapper),
        mock.patch.object(nn.parallel.distributed, "DistributedDataParallel", wrapper),
        mock.patch.object(distributed_test, "DistributedDataParallel", wrapper),
    ):
        yield


class OfTorch(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """torch's tests of torch's wrapper."""

    wrapper: type[nn.Module] = TorchOnCpu

    def setUp(self) -> None:
        super().setUp()
        # torch starts new processes, which takes longer than most tests. Nothing has started
        # threads in this process.
        self._start_processes(multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        with cuda_on_cpu(RANKS), replaced_by(cls.wrapper):
            super()._run(*args, **kwargs)


class OfOurs(OfTorch):
    """torch's tests of the project's wrapper."""

    wrapper = OursOnCpu


def names_of_tests() -> list[str]:
    """Return the names of the tests whose code mentions the wrapper."""
    return [
        name
        for name, test in inspect.getmembers(OfTorch, inspect.isfunction)
        if name.startswith("test_")
        and re.search("DistributedDataParallel|DDP", inspect.getsource(inspect.unwrap(test)), re.I)
    ]
