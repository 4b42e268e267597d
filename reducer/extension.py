"""The compiled module ``reducer._C``: what it was compiled for, and why it does not load."""

import json
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["BUILT_WITH", "NAME", "REMEDY", "built_with", "explained"]

NAME = "reducer._C"
BUILT_WITH = Path(__file__).with_name("built_with.json")
"""Written by setup.py, next to the compiled module."""
REMEDY = (
    "compile commhooks for this Python and torch: `pip install --no-build-isolation "
    "--force-reinstall --no-deps .` in its source folder, or `make build`"
)


def built_with() -> dict[str, str | None]:
    """Versions of "torch" and "cuda" (None: without) that it was compiled for; empty if unknown."""
    if not BUILT_WITH.exists():
        return {}
    versions: dict[str, str | None] = json.loads(BUILT_WITH.read_text())
    return versions


@contextmanager
def explained() -> Iterator[None]:
    """Around the import of the compiled module.

    Raises ImportError, whose ``name`` is :data:`NAME`, with the reason, and the remedy as a note.
    """
    try:
        yield
    except ImportError as error:
        explanation = ImportError(_reason(error), name=NAME, path=error.path)
        explanation.add_note(REMEDY)
        raise explanation from error


def _reason(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError):
        folder = Path(__file__).parent
        wanted = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        others = ", ".join(sorted(path.name for path in folder.glob("_C*.so")))
        return f"{folder} has no {wanted}" + (f", but {others} for another Python" * bool(others))
    text = f"{NAME} does not load: {error}"
    torch_then = built_with().get("torch")
    if torch_then not in (None, torch.__version__):
        text += f"; it was compiled against torch {torch_then}, and this is {torch.__version__}"
    return text
