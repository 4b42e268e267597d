"""Compile all kernels for the device in parallel: ``python -m bench.gpu.kernels``."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from commhooks.kernels import loader
from commhooks.kernels.source import SOURCES


def compile_kernel(source: int, kernel: str, arch: str) -> None:
    """Compile a kernel of one of ``SOURCES`` into CuPy's cache."""
    loader._machine_code(SOURCES[source], kernel, arch)


def main() -> None:
    """Compile each kernel in one of several processes."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    kernels = [(i, kernel, arch) for i, source in enumerate(SOURCES) for kernel in source.kernels]
    # Processes that are forked from this one could not use CUDA.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([loader.__name__])
    with ProcessPoolExecutor(os.cpu_count(), context) as processes:
        for compiled in [processes.submit(compile_kernel, *kernel) for kernel in kernels]:
            compiled.result()
    print(f"{len(kernels)} kernels for {arch}")


if __name__ == "__main__":
    main()
