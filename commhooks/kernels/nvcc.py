"""CUDA sources to machine code with nvcc, which says more than NVRTC about what is dubious."""

import shutil
import subprocess
from tempfile import TemporaryDirectory

from commhooks.errors import CommHookError
from commhooks.kernels.nvrtc import options_for
from commhooks.kernels.source import Source

__all__ = ["compile_with_nvcc", "find_nvcc"]


def find_nvcc() -> str | None:
    """Where nvcc is, if it is installed."""
    return shutil.which("nvcc")


def compile_with_nvcc(nvcc: str, source: Source, arch: str) -> str:
    """What ptxas tells of all kernels of a source. Raises CommHookError also on a warning."""
    # Templates are compiled where their address is taken.
    kernels = "".join(f"  (const void*)&{kernel},\n" for kernel in source.kernels)
    text = f'#include "{source.file}"\nextern const void* const kernels[] = {{\n{kernels}}};\n'
    with TemporaryDirectory() as directory:
        command = [nvcc, *options_for(arch), "--Werror=all-warnings", "-x=cu", "-cubin",
                   f"-o={directory}/kernels.cubin", "-"]  # fmt: skip
        run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise CommHookError(f"{source.file} for {arch}: nvcc says\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr
