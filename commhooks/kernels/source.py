"""The CUDA sources of this package, and the names of their kernels."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

DIRECTORY = Path(__file__).parent
"""The directory of the sources, to which their ``#include`` lines are relative."""


TYPES = {torch.float32: "float", torch.float64: "double"}
"""Types in which kernels compute, ``at_least_float32(dtype)``."""

ELEMENTS = TYPES | {
    torch.float16: "commhooks::kernels::Half",
    torch.bfloat16: "commhooks::kernels::BFloat16",
}
"""Types of gradients and of values on the wire; see element.h."""


def kernel_name(name: str, *arguments: str | int) -> str:
    """Return the C++ expression of a kernel with these template arguments."""
    template = f"<{', '.join(map(str, arguments))}>" if arguments else ""
    return f"commhooks::kernels::{name}{template}"


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
