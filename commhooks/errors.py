"""The exceptions of this package.

Messages state what was expected, what was found, on which rank, bucket or parameter, and what to
do.
"""

import difflib
from collections.abc import Iterable

from reducer.errors import CommHookError, CommHookMismatchError, CommHookPeerError

__all__ = [
    "CommHookError",
    "CommHookMismatchError",
    "CommHookOptionError",
    "CommHookPeerError",
    "CommHookResultError",
    "CommHookStateError",
    "UnknownHookError",
    "did_you_mean",
    "reason_of",
]


class UnknownHookError(CommHookError, LookupError):
    """No hook has the given name."""


class CommHookOptionError(CommHookError, ValueError):
    """An option of a hook is unknown, missing, has the wrong type or is out of range."""


class CommHookStateError(CommHookError, ValueError):
    """A saved state is damaged, or belongs to a different hook, model or rank."""


class CommHookResultError(CommHookError):
    """A hook returned a tensor that does not fit its bucket, or awaited an unsupported object."""


def reason_of(error: BaseException) -> str:
    """Return an error in one line. An error that is not one of ours begins with its type."""
    line = str(error).partition("\n")[0].rstrip(":")
    return line if isinstance(error, CommHookError) else f"{type(error).__name__}: {line}"


def did_you_mean(unknown: str, names: Iterable[str]) -> str:
    """Return the part of a message that suggests one of ``names``; empty if none is similar."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(unknown.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""
