"""Compile all kernels for the device in parallel: ``python -m bench.gpu.kernels``."""

from __future__ import annotations

import importlib
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
    """Compile the kernels, one in each process."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    names = [f"commhooks.kernels.{path.stem}" for path in sorted(DIRECTORY.glob("*.cu"))]
    kernels = [(name, kernel) for name in names
               for kernel in importlib.import_module(name).SOURCE.kernels]  # fmt: skip
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        for _ in processes.map(compile_kernel, *zip(*kernels, strict=True), len(kernels) * [arch]):
            pass
    print(f"{len(kernels)} kernels for {arch}")


if __name__ == "__main__":
    main()
