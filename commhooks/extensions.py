"""The two compiled modules of this project: Note [Without extensions] in reducer/extension.py."""

from pathlib import Path

from reducer.extension import ENGINE, Extension

__all__ = ["ENGINE", "EXTENSIONS", "KERNELS", "load_extensions"]

KERNELS = Extension("commhooks._C", Path(__file__).parent)
EXTENSIONS = (ENGINE, KERNELS)


def load_extensions() -> None:
    """Import both; raise ImportError, which says what to do, if one is broken."""
    for extension in EXTENSIONS:
        extension.load()
