"""The errors that both packages raise; :mod:`commhooks.errors` has the others."""


class CommHookError(RuntimeError):
    """Base class of all errors of this package; also raised if a hook's own code fails."""

    path: str = ""
    """The path of the affected option in a hook's config, such as "inner.density"."""


class CommHookMismatchError(CommHookError):
    """Ranks registered different hooks or options, or are in different calls."""


class CommHookPeerError(CommHookError):
    """Ranks can no longer work together: another rank failed, ended or does not answer."""
