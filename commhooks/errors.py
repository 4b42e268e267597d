"""What can go wrong with hooks.

Texts say what was expected, what was found, on which rank, bucket or parameter, and what to do.
"""

__all__ = [
    "CommHookError",
    "CommHookMismatchError",
    "CommHookOptionError",
    "CommHookPeerError",
    "CommHookResultError",
    "CommHookStateError",
    "UnknownHookError",
]


class CommHookError(RuntimeError):
    """Base of all errors of this package; raised as such when a hook's own code raises."""

    path: str = ""
    """Of the option that it is about, in a hook's config: "rank", "inner.density"."""


class UnknownHookError(CommHookError, LookupError):
    """No hook has this name."""


class CommHookOptionError(CommHookError, ValueError):
    """An option of a hook is unknown, missing, of the wrong type or out of range."""


class CommHookStateError(CommHookError, ValueError):
    """A saved state is damaged, or belongs to another hook, model or rank."""


class CommHookMismatchError(CommHookError):
    """Ranks registered different hooks or options."""


class CommHookResultError(CommHookError):
    """A hook returned something that is not the average of its bucket, or awaited something odd."""


class CommHookPeerError(CommHookError):
    """A step failed on this rank because it failed, or ended, on another."""
