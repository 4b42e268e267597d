"""What ptxas tells of each kernel: registers, spills, shared memory."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["MOST_REGISTERS", "Usage", "usages"]

MOST_REGISTERS = 128
"""Per thread. With so many, thread blocks of 256 still leave a multiprocessor half of its loads."""

_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """Of one kernel on one architecture. Bytes of spills: stored and loaded, per thread."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def is_within_bounds(self) -> bool:
        """Nothing spilled, and no more registers than :data:`MOST_REGISTERS`."""
        return self.spilled_bytes == 0 and self.registers <= MOST_REGISTERS


def usages(log: str, names: Mapping[str, str]) -> Iterator[Usage]:
    """Of all kernels in a log of ptxas. ``names``: of kernels, by what the log calls them."""
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
