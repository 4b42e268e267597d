"""Compile kernels, load them on a GPU with CuPy, and launch them through the driver."""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import threading
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import torch

from commhooks.errors import CommHookError
from commhooks.kernels.nvrtc import compile_source, nvrtc, options_for
from commhooks.kernels.source import Source


class CudaBackend:
    """Runs kernels on CUDA devices, and compiles each one when it is first launched.

    Machine code is cached on disk, beside CuPy's own.

    Note [Contexts]: a thread that has not called the CUDA runtime has no context, and the driver
    rejects its launches. ``setDevice`` binds a context. torch's device guard would not help: it
    does nothing if the device is the current one, and otherwise takes longer than the launch.
    """

    def require(self, device: torch.device) -> None:  # noqa: ARG002
        """Raise CommHookError, which says what to install, if kernels cannot run there."""
        _check_cupy()

    def launch(
        self,
        source: Source,
        kernel: str,
        grid: tuple[int, int, int],
        block: int,
        parameters: int,
        count: int,  # noqa: ARG002
        device_index: int,
    ) -> None:
        """Launch a kernel of ``source`` on torch's current stream. See Note [Contexts].

        ``parameters`` is the address of an array of ``count`` pointers to the arguments.
        """
        _check_cupy()
        cuda = _cuda()
        stream = torch._C._cuda_getCurrentRawStream(device_index)  # noqa: SLF001
        before = cuda.runtime.getDevice()
        cuda.runtime.setDevice(device_index)
        try:
            function = _function(source, kernel, device_index)
            cuda.driver.launchKernel(function, *grid, block, 1, 1, 0, stream, parameters, 0)
        except cuda.driver.CUDADriverError as error:
            raise CommHookError(
                f"{kernel}: cuda:{device_index} refused to launch {grid} blocks of {block} "
                f"threads: {error}"
            ) from error
        finally:
            if before != device_index:
                cuda.runtime.setDevice(before)


@cache
def _cuda() -> Any:
    return import_module("cupy.cuda")


@cache
def _check_cupy() -> None:
    """Raise CommHookError unless there is a CuPy for the CUDA version of torch."""
    version = torch.version.cuda
    if version is None:
        raise CommHookError(
            f"expected a torch for CUDA, found {torch.__version__}: install one for CUDA"
        )
    major = version.partition(".")[0]
    wanted = f"CuPy for CUDA {major}"
    try:
        found = f"CuPy for CUDA {nvrtc().getVersion()[0]}"
    except Exception as error:  # from imports, or from looking for CUDA's libraries
        found = f"none that can be used ({error})"
    if found != wanted:
        packages = sorted(set(packages_distributions().get("cupy", [])))
        uninstall = f"pip uninstall {' '.join(packages)}, then " if packages else ""
        raise CommHookError(
            f"kernels on CUDA tensors need {wanted}, the version of torch {torch.__version__}; "
            f"found {found}: {uninstall}pip install 'commhooks[cuda{major}]'"
        )


@cache
def _function(source: Source, kernel: str, device_index: int) -> int:
    """Return the driver's handle of a kernel, in the context of a device, the current one."""
    major, minor = torch.cuda.get_device_capability(device_index)
    cubin, name = _machine_code(source, kernel, f"sm_{major}{minor}")
    return int(_module(cubin, device_index).get_function(name).kernel.ptr)


@cache
def _module(cubin: Path, device_index: int) -> Any:  # noqa: ARG001
    """Load machine code on the current device; it stays loaded until the process ends."""
    return import_module("cupy").RawModule(path=str(cubin))


def _machine_code(source: Source, kernel: str, arch: str) -> tuple[Path, str]:
    """Return a file with the kernel's machine code, and the name of the kernel in it."""
    key = repr((source.digest, kernel, options_for(arch), nvrtc().getVersion()))
    digest = hashlib.sha256(key.encode()).hexdigest()
    cubin = _cache_directory() / f"commhooks-{digest}.cubin"
    name = cubin.with_suffix(".json")
    if not (cubin.exists() and name.exists()):
        compiled = compile_source(source, [kernel], arch)
        _write(name, json.dumps(compiled.names[kernel]).encode())
        _write(cubin, compiled.cubin)
    return cubin, json.loads(name.read_text())


def _cache_directory() -> Path:
    """Return CuPy's cache directory, or a temporary one if it is not writable."""
    directory = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    except OSError:  # e.g. the home directory is read-only or missing
        pass
    return _temporary_directory()


@cache
def _temporary_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="commhooks-kernels-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _write(path: Path, content: bytes) -> None:
    """Write a file in one step, because other processes and threads may read and write it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    part.write_bytes(content)
    part.replace(path)
