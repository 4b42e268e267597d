"""The command line, ``commhooks``; needs the extra ``commhooks[cli]``."""

import signal
import sys
from typing import NoReturn

from commhooks.extensions import load_extensions

__all__ = ["main"]

_EXTRA = ("click", "matplotlib", "psutil", "rich")


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    signal.signal(signal.SIGTERM, _end)  # with cleanup, as after Ctrl-C
    try:
        from commhooks.cli.commands import commands

        commands(prog_name="commhooks")
    except ImportError as error:
        if error.name in _EXTRA:
            sys.exit(
                f"commhooks: the command line needs {error.name}, which is not installed; "
                "pip install 'commhooks[cli]'"
            )
        try:
            load_extensions()
        except ImportError as cause:
            sys.exit(f"commhooks: {cause}. Run `commhooks doctor` to see what to do.")
        raise


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)
