"""The CUDA sources of this package."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["DIRECTORY", "Source"]

DIRECTORY = Path(__file__).parent
"""The directory of the sources, to which their ``#include`` lines are relative."""


@dataclass(frozen=True, eq=False)  # a key by identity, in launches
class Source:
    """A CUDA file of this folder, and the kernels in it that are used.

    ``kernels`` are C++ expressions that name them, including template arguments. All parameters of
    a kernel have 8 bytes: pointers, ``long long`` and ``double``; see launcher.py.
    """

    file: str
    kernels: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The path of the file."""
        return DIRECTORY / self.file

    @cached_property
    def digest(self) -> str:
        """A digest of the file and of all headers that it may include."""
        digest = hashlib.sha256(self.path.read_bytes())
        for header in sorted(DIRECTORY.rglob("*.h")):
            digest.update(header.read_bytes())
        return digest.hexdigest()
