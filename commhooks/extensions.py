"""The two compiled modules that this package needs."""

from pathlib import Path

from reducer.extension import ENGINE, Extension

__all__ = ["EXTENSIONS", "load_extensions"]

EXTENSIONS = (ENGINE, Extension("commhooks._C", Path(__file__).parent))


def load_extensions() -> None:
    """Import both; raise ImportError, which says what to do, if one does not load."""
    for extension in EXTENSIONS:
        extension.load()
