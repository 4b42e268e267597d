"""The command line, ``commhooks``; needs the extra ``commhooks[cli]``."""

import sys

__all__ = ["main"]

_EXTRA = ("click", "matplotlib", "rich")


def main() -> None:
    """Runs the command that ``sys.argv`` names."""
    try:
        from commhooks.cli.commands import commands
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.exit(
            f"commhooks: the command line needs {error.name}, which is not installed; "
            "pip install 'commhooks[cli]'"
        )
    commands(prog_name="commhooks")
