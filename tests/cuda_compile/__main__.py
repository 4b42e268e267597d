"""Compile every kernel for the supported GPUs; no GPU is needed.

    PYTHONPATH=csrc:tests python -m cuda_compile

The kernels of hooks with NVRTC from CuPy's package, as on a user's machine, and with nvcc, which
warns about more; those of the engine with nvcc and torch's flags, as the build does. Prints the
registers, spills and shared memory of the kernels of hooks. Fails if a compiler is missing or warns
or a kernel exceeds the bounds in report.py.
"""

import sys
from collections.abc import Iterable
from itertools import groupby

from commhooks.errors import CommHookError
from commhooks.kernels.nvrtc import compile_source
from commhooks.kernels.source import SOURCES, Source
from cuda_compile.nvcc import PACKING, compile_packing, compile_with_nvcc
from cuda_compile.report import MOST_REGISTERS, Usage, usages

ARCHITECTURES = ("sm_80", "sm_90")


def main() -> int:
    """Compile all kernels; return the exit status, 1 if a kernel has a problem."""
    try:
        found = [
            (source.file, compiler, arch, usage)
            for source in SOURCES
            for compiler in ("NVRTC", "nvcc")
            for arch in ARCHITECTURES
            for usage in _compile(compiler, source, arch)
        ]
        for path in PACKING:
            for arch in ARCHITECTURES:
                compile_packing(path, arch)
                print(f"{path.name}, nvcc with torch's flags, for {arch}: compiled")
    except CommHookError as error:
        print(error, file=sys.stderr)
        return 1
    for (*where, arch), group in groupby(found, key=lambda row: row[:3]):
        print(f"\n{', '.join(where)} for {arch}")
        print(*_table(usage for *_, usage in group), sep="\n")
    failed = sorted({usage.kernel for *_, usage in found if not usage.is_within_bounds})
    if failed:
        print(f"\nspilled, or more than {MOST_REGISTERS} registers: {', '.join(failed)}")
    return 1 if failed else 0


def _compile(compiler: str, source: Source, arch: str) -> list[Usage]:
    if compiler == "NVRTC":
        compiled = compile_source(source, source.kernels, arch)
        if "warning" in compiled.log:
            raise CommHookError(f"{source.file} for {arch}: NVRTC warns\n{compiled.log}")
        log, names = compiled.log, {name: kernel for kernel, name in compiled.names.items()}
    else:
        log, names = compile_with_nvcc(source, arch), {}
    found = list(usages(log, names))
    if len(found) != len(source.kernels):
        raise CommHookError(
            f"{source.file} for {arch}: expected {len(source.kernels)} kernels in the machine code "
            f"of {compiler}, found {len(found)}"
        )
    return found


def _table(rows: Iterable[Usage]) -> Iterable[str]:
    yield f"{'kernel':<36}{'registers':>10}{'spilled B':>11}{'shared B':>10}"
    for row in sorted(rows, key=lambda row: row.kernel):
        yield f"{row.kernel:<36}{row.registers:>10}{row.spilled_bytes:>11}{row.shared_bytes:>10}"


if __name__ == "__main__":
    sys.exit(main())
