"""Compile all kernels for the device in parallel: ``python -m bench.gpu.kernels``."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from commhooks.kernels import loader
from commhooks.kernels.source import SOURCES


def main() -> None:
    """Compile each kernel in one of several processes."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    kernels = [(source, kernel, arch) for source in SOURCES for kernel in source.kernels]
    # Processes that are forked from this one could not use CUDA.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([loader.__name__])
    with ProcessPoolExecutor(os.cpu_count(), context) as processes:
        list(processes.map(loader._machine_code, *zip(*kernels, strict=True)))
    print(f"{len(kernels)} kernels for {arch}")


if __name__ == "__main__":
    main()
