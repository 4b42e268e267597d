"""The errors that both packages raise; :mod:`commhooks.errors` has the others."""

from typing import Any


class CommHookError(RuntimeError):
    """Base class of all errors of this package; also raised if a hook's own code fails."""

    path: str = ""
    """The path of the affected option in a hook's config, such as "inner.density"."""


class CommHookMismatchError(CommHookError):
    """Ranks registered different hooks or options, or are in different calls."""


class CommHookPeerError(CommHookError):
    """Ranks can no longer work together: another rank failed, ended or does not answer."""


def expect(kind: Any, **arguments: object) -> None:
    """Raise TypeError, with its name, for the first argument that is not of this type or union."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            kinds = getattr(kind, "__args__", (kind,))  # of a union, in which None is NoneType
            expected = " or ".join(each.__name__.removesuffix("Type") for each in kinds)
            raise TypeError(f"{name}: expected {expected}, found {value!r}.")
