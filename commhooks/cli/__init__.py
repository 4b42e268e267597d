"""The command line, ``commhooks``; needs the extra ``commhooks[cli]``."""

import signal
import sys
from typing import NoReturn

from commhooks.extensions import load_extensions

__all__ = ["main"]

_EXTRA = ("click", "matplotlib", "rich")


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    try:
        from commhooks.cli.commands import commands
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.exit(
            f"commhooks: the command line needs {error.name}, which is not installed; "
            "pip install 'commhooks[cli]'"
        )
    signal.signal(signal.SIGTERM, _end)  # with cleanup, as after Ctrl-C
    try:
        commands(prog_name="commhooks")
    except ImportError:
        try:
            load_extensions()
        except ImportError as error:
            sys.exit(f"commhooks: {error}. Run `commhooks doctor` to see what to do.")
        raise


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)
