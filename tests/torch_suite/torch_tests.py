"""torch's own tests, made to run with any DDP wrapper on Gloo and the CPU.

Those of the installed torch are always there. TORCH_TESTS names the folder ``test/distributed`` of
a checkout of torch: the classes of its files that wrap a model are run as well.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import unittest
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing._internal import common_cuda, common_distributed

import commhooks
from torch_suite import replicas
from torch_suite.cuda_on_cpu import CudaOnCpu, cuda_on_cpu

RANKS = 2
_DEVICES = 4
_SECONDS = 240  # on a busy machine
FILES = [
    "test_c10d_common",
    "test_c10d_gloo",
    "test_c10d_nccl",
    "test_c10d_pypg",
    "algorithms/ddp_comm_hooks/test_ddp_hooks",
    "algorithms/test_join",
    "optim/test_zero_redundancy_optimizer",
    "_composable/test_replicate",
    "checkpoint/test_state_dict",
    "pipelining/test_composability",
    "test_composability",
    "test_dynamo_distributed",
]
# Read when torch's tests are imported.
os.environ |= {
    "BACKEND": "gloo",
    "WORLD_SIZE": str(RANKS),
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",  # seconds per test
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
}


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
        replicas.watch(self)


class TorchOnCpu(OnCpu, TorchDDP):
    """torch's wrapper."""


class OursOnCpu(OnCpu, commhooks.DistributedDataParallel):
    """The wrapper under test."""


class TorchTest(NamedTuple):
    """A test of torch."""

    case: type[unittest.TestCase]
    name: str

    @property
    def id(self) -> str:
        """The name that pytest shows; that of the method for torch's installed tests."""
        if self.case is Installed:
            return self.name
        return f"{self.case.__module__}.{self.case.__name__}.{self.name}"

    def why_not(self, wrapper: type[nn.Module]) -> str:
        """Run the test with a wrapper in a new process. Return why it failed, or an empty text.

        The process is forked, and so are the ranks that the test starts: that takes less time than
        most tests, and they inherit the replacements of :func:`emulated`. Warns if the replicas
        differ after a step of an optimizer.
        """
        with tempfile.NamedTemporaryFile("r") as records:
            problem = self._fork(wrapper, records.name)
            if difference := replicas.first_difference(records):
                warnings.warn(f"{self.id}, {wrapper.__name__}: {difference}", stacklevel=2)
        return problem

    def _fork(self, wrapper: type[nn.Module], records: str) -> str:
        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=self._run, args=(wrapper, sender, records))
        process.start()
        sender.close()
        try:
            if not receiver.poll(_SECONDS):
                return f"no result after {_SECONDS} s"
            return receiver.recv()
        except EOFError:
            process.join()
            return f"the process ended with exit code {process.exitcode}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it left
            process.join()

    def _run(self, wrapper: type[nn.Module], sender: Any, records: str) -> None:
        os.setpgid(0, 0)
        replicas.record_steps(records)
        result = unittest.TestResult()
        with emulated(wrapper):
            unittest.TestSuite([self.case(self.name)]).run(result)
        problems = [*result.errors, *result.failures, *result.skipped]
        sender.send("".join(text for _, text in problems[:1]))


def run_always(test: Any) -> Any:
    """Replace a decorator that skips a test if there are not enough GPUs."""
    return test


_run_in_thread = common_distributed.MultiThreadedTestCase.run_test_with_threaded_pg


def run_in_thread(*args: Any) -> None:
    """Run a test in a thread, which has modes of its own."""
    with CudaOnCpu():
        _run_in_thread(*args)


def _gloo(store: Any, rank: int, size: int, *_: Any) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))


def _without_nccl(function: Any) -> Any:
    """Let a function of torch.distributed use Gloo where NCCL is named."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if argument == "nccl" else argument for argument in args)
        if kwargs.get("backend") in ("nccl", "cpu:gloo,cuda:nccl"):
            kwargs["backend"] = "gloo"
            kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        return function(*args, **kwargs)

    return replacement


@contextmanager
def imitated() -> Iterator[None]:
    """Return a context in which NCCL seems to exist, and nothing asks for GPUs."""
    skips = ["skip_if_lt_x_gpu", "requires_nccl", "requires_nccl_version", "requires_accelerator"]
    with (
        mock.patch.multiple(
            common_distributed,
            skip_if_no_gpu=run_always,
            **{
                name: lambda *_, **__: run_always
                for name in (*skips, "requires_accelerator_dist_backend")
                if hasattr(common_distributed, name)
            },
        ),
        mock.patch.multiple(
            dist,
            create=True,
            is_nccl_available=lambda: True,
            ProcessGroupNCCL=_gloo,
            init_process_group=_without_nccl(dist.init_process_group),
            new_group=_without_nccl(dist.new_group),
        ),
        mock.patch.object(
            common_distributed.MultiThreadedTestCase, "run_test_with_threaded_pg", run_in_thread
        ),
        mock.patch.object(common_cuda, "TEST_MULTIGPU", True),
        mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 30)),
        cuda_on_cpu(_DEVICES),
    ):
        yield


@contextmanager
def emulated(wrapper: type[nn.Module]) -> Iterator[None]:
    """Return a context in which ``wrapper`` is torch's, and processes are forked."""
    fork = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        stack.enter_context(imitated())
        stack.enter_context(
            mock.patch.multiple(
                torch.multiprocessing,
                get_context=lambda *_: fork,
                set_start_method=lambda *_, **__: None,
            )
        )
        for module in [nn.parallel, nn.parallel.distributed, *_modules]:
            for name, value in list(vars(module).items()):
                if value is TorchDDP:
                    stack.enter_context(mock.patch.object(module, name, wrapper))
        yield


with imitated():
    from torch.testing._internal.distributed import distributed_test

_modules: list[ModuleType] = [distributed_test]


class Installed(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The tests of the installed torch."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


def all_tests() -> list[TorchTest]:
    """Return all tests whose code, or whose class in a file, mentions the wrapper."""
    found = [
        TorchTest(Installed, name)
        for name, test in inspect.getmembers(Installed, inspect.isfunction)
        if name.startswith("test_") and _mentions_ddp(inspect.unwrap(test))
    ]
    if folder := os.environ.get("TORCH_TESTS"):
        for file in FILES:
            if (path := Path(folder, f"{file}.py")).exists():
                found += _tests_of(path)
    return found


def _tests_of(path: Path) -> list[TorchTest]:
    sys.path[:0] = [str(path.parent)]
    try:
        with imitated():
            module = importlib.import_module(path.stem)
    except (Exception, SystemExit) as error:
        print(f"{path} cannot be imported: {type(error).__name__}: {error}", file=sys.stderr)
        return []
    _modules.append(module)
    loader = unittest.TestLoader()
    return [
        TorchTest(case, name)
        for _, case in inspect.getmembers(module, inspect.isclass)
        if issubclass(case, unittest.TestCase) and case.__module__ == module.__name__
        if any(_mentions_ddp(base) for base in case.__mro__ if base.__module__.startswith("test_"))
        for name in loader.getTestCaseNames(case)
    ]


def _mentions_ddp(thing: Any) -> bool:
    return bool(re.search("DistributedDataParallel|DDP", inspect.getsource(thing), re.I))
