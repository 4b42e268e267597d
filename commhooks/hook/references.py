"""Find classes and functions by reference: ``package.module:name``, or ``train.py:name``."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from commhooks.errors import CommHookError, did_you_mean


def import_module(name: str, where: str = "") -> ModuleType:
    """Import a module, or a file whose name ends with ``.py``. Raises CommHookError.

    The folder of a file is added to ``sys.path``, as Python does for a script.
    """
    try:
        return _import(name)
    except (Exception, SystemExit) as error:
        raise CommHookError(
            f"{where}{name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def load_reference(reference: str) -> Any:
    """Import the object ``package.module:name``, or ``folder/file.py:name``. Raises CommHookError.

    The current directory is searched only if it is on ``sys.path``. A script is imported, so it
    must not train then.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise CommHookError(f"expected package.module:name or file.py:name, found {reference!r}")
    found: Any = import_module(module_name, f"{reference!r}: ")
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise CommHookError(
                f"{reference!r}: {module_name!r} has no {attribute!r}"
                f"{did_you_mean(part, dir(found))}"
            )
        found = getattr(found, part)
    return found


def reference_to(found: Any) -> str:
    """Return the reference by which other processes find a class or function.

    Raises CommHookError if there is none.
    """
    module = getattr(found, "__module__", None)
    reference = f"{module}:{getattr(found, '__qualname__', '')}"
    is_file = hasattr(sys.modules.get(str(module)), "__file__")  # else a notebook
    try:
        if is_file and load_reference(reference) is found:
            return reference
    except CommHookError:
        pass
    raise CommHookError(
        "expected a class or a function at the top of a module, which other processes can import; "
        f"found {found!r}"
    )


def _import(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve(strict=True)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    file = module.__file__
    if file is None or Path(file).resolve() != path:
        raise ImportError(f"another module is named {path.stem!r}: {file}; rename the file")
    return module
