"""Compile CUDA sources with nvcc, which warns about more than NVRTC."""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from extensions import NVCC_FLAGS, ROOT, find_nvcc
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

from commhooks.errors import CommHookError
from commhooks.kernels.nvrtc import options_for
from commhooks.kernels.source import Source

__all__ = ["PACKING", "compile_packing", "compile_with_nvcc"]

PACKING = sorted((ROOT / "csrc" / "packing" / "cuda").glob("*.cu"))
"""The sources that the package's build compiles, with torch's flags."""


def compile_with_nvcc(source: Source, arch: str) -> str:
    """Return the output of ptxas for all kernels of a source.

    Raises CommHookError on an error or a warning.
    """
    # Taking the address of a template instantiates it.
    kernels = "".join(f"  (const void*)&{kernel},\n" for kernel in source.kernels)
    text = f'#include "{source.file}"\nextern const void* const kernels[] = {{\n{kernels}}};\n'
    options = (*options_for(arch), "--Werror=all-warnings", "-x=cu", "-")
    return _run(f"{source.file} for {arch}", options, text)


def compile_packing(path: Path, arch: str) -> None:
    """Compile a source of the engine as the build does; raise as :func:`compile_with_nvcc`."""
    options = (*COMMON_NVCC_FLAGS, *NVCC_FLAGS, f"-I{ROOT / 'csrc'}", f"-arch={arch}", str(path))
    _run(f"{path.relative_to(ROOT)} for {arch}", options)


def _run(what: str, options: tuple[str, ...], text: str | None = None) -> str:
    nvcc = find_nvcc()
    if nvcc is None:
        raise CommHookError("nvcc not found: install a CUDA toolkit, or the extra `nvcc`")
    with TemporaryDirectory() as folder:
        command = [nvcc, *options, "-cubin", f"-o={folder}/kernels.cubin"]
        run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise CommHookError(f"{what}: nvcc fails with\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr
