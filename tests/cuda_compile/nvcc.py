"""Compile CUDA sources with nvcc, which warns about more than NVRTC."""

import shutil
import subprocess
from tempfile import TemporaryDirectory

from commhooks.errors import CommHookError
from commhooks.kernels.nvrtc import options_for
from commhooks.kernels.source import Source

__all__ = ["compile_with_nvcc", "find_nvcc"]


def find_nvcc() -> str | None:
    """Return the path of nvcc, or None if it is not installed."""
    return shutil.which("nvcc")


def compile_with_nvcc(nvcc: str, source: Source, arch: str) -> str:
    """Return the output of ptxas for all kernels of a source.

    Raises CommHookError on an error or a warning.
    """
    # Taking the address of a template instantiates it.
    kernels = "".join(f"  (const void*)&{kernel},\n" for kernel in source.kernels)
    text = f'#include "{source.file}"\nextern const void* const kernels[] = {{\n{kernels}}};\n'
    with TemporaryDirectory() as directory:
        command = [nvcc, *options_for(arch), "--Werror=all-warnings", "-x=cu", "-cubin",
                   f"-o={directory}/kernels.cubin", "-"]  # fmt: skip
        run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise CommHookError(f"{source.file} for {arch}: nvcc fails with\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr
