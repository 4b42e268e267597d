"""CUDA sources to machine code. NVRTC comes with CuPy's package; no GPU or driver is needed.

CuPy could compile as well, but it adds ``-ftz=true``, with which a GPU takes tiny numbers for zero
and a CPU does not; and it keeps what it has compiled when a header changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from commhooks.errors import CommHookError
from commhooks.kernels.source import DIRECTORY, Source

__all__ = ["Compiled", "compile_source", "nvrtc", "options_for"]


@cache
def nvrtc() -> Any:
    """CuPy's binding of it. Raises ImportError without CuPy."""
    return import_module("cupy.cuda").nvrtc


@dataclass(frozen=True)
class Compiled:
    """``names``: of the kernels in the machine code, by their C++ expressions.

    ``log``: warnings of the compiler, and what ptxas tells of registers and memory.
    """

    cubin: bytes
    names: dict[str, str]
    log: str


def options_for(arch: str) -> tuple[str, ...]:
    """Of the compiler, for an architecture such as "sm_90".

    Arithmetic is rounded as on a CPU, so that both give the same bits: no fused multiply-add, no
    approximate division or square root, nothing tiny taken for zero.
    """
    exact = ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false")
    return ("-std=c++17", f"-arch={arch}", f"-I{DIRECTORY}", *exact, "--ptxas-options=-v")


def compile_source(source: Source, kernels: Sequence[str], arch: str) -> Compiled:
    """Some kernels of a source, for one architecture.

    Raises CommHookError with the compiler's words if it refuses.
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
            raise CommHookError(f"{source.file} for {arch}: NVRTC says {error}\n{log}") from error
        names = {kernel: binding.getLoweredName(program, kernel) for kernel in kernels}
        return Compiled(binding.getCUBIN(program), names, binding.getProgramLog(program))
    finally:
        binding.destroyProgram(program)
