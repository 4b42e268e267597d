"""Compile all kernels for the device in parallel: ``python -m bench.gpu.kernels``."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from commhooks.kernels import loader
from commhooks.kernels.source import DIRECTORY


def compile_kernel(module: str, kernel: str, arch: str) -> None:
    """Compile a kernel into CuPy's cache."""
    source = importlib.import_module(module).SOURCE
    loader._machine_code(source, kernel, arch)


def main() -> None:
    """Compile each kernel in one of several processes."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    modules = [f"commhooks.kernels.{path.stem}" for path in sorted(DIRECTORY.glob("*.cu"))]
    kernels = [
        (module, kernel, arch)
        for module in modules
        for kernel in importlib.import_module(module).SOURCE.kernels
    ]
    # Processes that are forked from this one could not use CUDA.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([loader.__name__])
    with ProcessPoolExecutor(os.cpu_count(), context) as processes:
        for compiled in [processes.submit(compile_kernel, *kernel) for kernel in kernels]:
            compiled.result()
    print(f"{len(kernels)} kernels for {arch}")


if __name__ == "__main__":
    main()
