"""Compile CUDA sources with NVRTC, which comes with CuPy; no GPU or driver is needed.

CuPy's own compilation is not used for two reasons. It adds ``-ftz=true``, with which a GPU flushes
subnormal numbers to zero and a CPU does not. And it does not recompile when a header changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from commhooks.errors import CommHookError
from commhooks.kernels.source import DIRECTORY, Source


@cache
def nvrtc() -> Any:
    """Return CuPy's binding of NVRTC. Raises ImportError without CuPy."""
    return import_module("cupy.cuda").nvrtc


@dataclass(frozen=True)
class Compiled:
    """The machine code of some kernels.

    ``names`` are the names of the kernels in it, by their C++ expressions. ``log`` has the warnings
    of the compiler, and the registers and memory that ptxas reports.
    """

    cubin: bytes
    names: dict[str, str]
    log: str


def options_for(arch: str) -> tuple[str, ...]:
    """Return the compiler's options for an architecture such as "sm_90".

    Arithmetic is rounded as on a CPU, so that both give the same bits: no fused multiply-add, no
    approximate division or square root, and no flush of subnormal numbers to zero.
    """
    exact = ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false")
    return ("-std=c++17", f"-arch={arch}", f"-I{DIRECTORY}", *exact, "--ptxas-options=-v")


def compile_source(source: Source, kernels: Sequence[str], arch: str) -> Compiled:
    """Compile some kernels of a source for one architecture.

    Raises CommHookError with the compiler's messages if that fails.
    """
    binding = nvrtc()
    program = binding.createProgram(source.path.read_text(), source.file, (), ())
    try:
        for kernel in kernels:
            binding.addNameExpression(program, kernel)
        try:
            binding.compileProgram(program, options_for(arch))
        except binding.NVRTCError as error:
            log = binding.getProgramLog(program)
            raise CommHookError(
                f"{source.file} for {arch}: NVRTC fails with {error}\n{log}"
            ) from error
        names = {kernel: binding.getLoweredName(program, kernel) for kernel in kernels}
        return Compiled(binding.getCUBIN(program), names, binding.getProgramLog(program))
    finally:
        binding.destroyProgram(program)
