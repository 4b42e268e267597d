"""Parse the registers, spills and shared memory of each kernel from the output of ptxas."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["MOST_REGISTERS", "Usage", "usages"]

MOST_REGISTERS = 128
"""The most registers per thread with which a multiprocessor can run enough thread blocks of 256."""

_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel on one architecture.

    ``spilled_bytes`` counts stores and loads of spilled registers, per thread.
    """

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def is_within_bounds(self) -> bool:
        """Whether nothing is spilled, and at most :data:`MOST_REGISTERS` registers are used."""
        return self.spilled_bytes == 0 and self.registers <= MOST_REGISTERS


def usages(log: str, names: Mapping[str, str]) -> Iterator[Usage]:
    """Yield the usage of all kernels in a log of ptxas.

    ``names`` maps names in the log to names of kernels.
    """
    kernel, spilled_bytes = "", 0
    for line in log.splitlines():
        if match := _KERNEL.search(line):
            kernel = match[1]
        elif match := _SPILLS.search(line):
            spilled_bytes = int(match[1]) + int(match[2])
        elif match := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            shared_bytes = int(shared[1]) if shared else 0
            yield Usage(names.get(kernel, kernel), int(match[1]), spilled_bytes, shared_bytes)
