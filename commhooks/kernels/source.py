"""The CUDA sources of this package, and the kernels in them that are used."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from commhooks.precision import at_least_float32

DIRECTORY = Path(__file__).parent
"""The directory of the sources, to which their ``#include`` lines are relative."""


TYPES = {torch.float32: "float", torch.float64: "double"}
"""Types in which kernels compute, ``at_least_float32(dtype)``."""

ELEMENTS = TYPES | {
    torch.float16: "commhooks::kernels::Half",
    torch.bfloat16: "commhooks::kernels::BFloat16",
}
"""Types of gradients and of values on the wire; see element.h."""


@cache
def kernel_name(name: str, *arguments: str | int) -> str:
    """Return the C++ expression of a kernel with these template arguments."""
    template = f"<{', '.join(map(str, arguments))}>" if arguments else ""
    return f"commhooks::kernels::{name}{template}"


@dataclass(frozen=True, eq=False)  # a key by identity, in launches
class Source:
    """A CUDA file of this folder, and the kernels in it that are used.

    ``kernels`` are C++ expressions that name them, including template arguments. All parameters of
    a kernel have 8 bytes: pointers, ``long long`` and ``double``. The last one may be a struct of
    these, whose members are arguments in :func:`launch`, where they lie one after the other.
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


def _of_numbers(*names: str) -> list[str]:
    return [kernel_name(name, type_) for type_ in TYPES.values() for name in names]


_FORMATS = re.findall(
    r"^  ROW\((.+)\)", (DIRECTORY / "codecs" / "formats.h").read_text(), re.MULTILINE
)
LOWRANK_RANKS = {torch.float32: (8, 16), torch.float64: (16,)}
"""The highest ranks that products with factors are compiled for; above, torch multiplies."""
_WIDE = {element: at_least_float32(dtype) for dtype, element in ELEMENTS.items()}

BLOCK_CODEC = Source(
    "block_codec.cu",
    (
        *(kernel_name("encode", codec, number) for codec in _FORMATS for number in TYPES.values()),
        *(
            kernel_name("decode", codec, number)
            for codec in _FORMATS
            if "true" not in codec
            for number in TYPES.values()
        ),
        kernel_name("find_not_finite"),
    ),
)
LOWRANK = Source(
    "lowrank.cu",
    (
        *_of_numbers("orthonormalize", "combine", "message", "average", "keep"),
        *(kernel_name("apply", TYPES[wide], element) for element, wide in _WIDE.items()),
        *(
            kernel_name(name, TYPES[wide], element, highest)
            for element, wide in _WIDE.items()
            for name in ("project_left", "project_right")
            for highest in LOWRANK_RANKS[wide]
        ),
    ),
)
MASKED = Source("masked.cu", (kernel_name("copy_if"),))
ROTATION = Source("rotation.cu", tuple(_of_numbers("rotate")))
ROUNDING = Source("rounding.cu", (kernel_name("round_stochastically"),))
SELECTION = Source(
    "selection.cu",
    tuple(_of_numbers("begin", "mark", "refine", "count", "list", "add_and_check")),
)
SPARSE = Source(
    "sparse.cu",
    (
        *(kernel_name(name) for name in ("count_indices", "unpack", "draw")),
        *_of_numbers("scatter_add", "correct_momentum"),
        *(kernel_name(name, element) for element in _WIDE for name in ("pack", "check")),
        *(kernel_name("store_mean", TYPES[wide], element) for element, wide in _WIDE.items()),
    ),
)
SOURCES = (BLOCK_CODEC, LOWRANK, MASKED, ROTATION, ROUNDING, SELECTION, SPARSE)
