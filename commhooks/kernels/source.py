"""CUDA sources of this package."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["DIRECTORY", "Source"]

DIRECTORY = Path(__file__).parent
"""Of the sources, and what their ``#include`` lines start from."""


@dataclass(frozen=True, eq=False)  # a key by identity, in launches
class Source:
    """A CUDA file of this folder, and the kernels in it that are used.

    ``kernels``: C++ expressions that name them, template arguments included. Their parameters are
    pointers, ``long long`` and ``double`` only, of 8 bytes each; see launcher.py.
    """

    file: str
    kernels: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Of the file."""
        return DIRECTORY / self.file

    @cached_property
    def digest(self) -> str:
        """Of the file and of all headers that it may include."""
        digest = hashlib.sha256(self.path.read_bytes())
        for header in sorted(DIRECTORY.rglob("*.h")):
            digest.update(header.read_bytes())
        return digest.hexdigest()
