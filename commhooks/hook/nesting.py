"""Check hooks around hooks: no hook may be inside itself, or in two places at once."""

from collections.abc import Iterator, Mapping
from typing import Any

from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.base import CommHook

__all__ = ["check_config", "check_nesting"]


def check_config(config: Mapping[str, Any]) -> None:
    """Raise CommHookOptionError if a config contains itself, as YAML's anchors allow."""
    _check_depth(config, "", ())


def check_nesting(hook: CommHook) -> None:
    """Raise CommHookError unless each hook in the tree of ``hook`` occurs once."""
    paths: dict[int, str] = {}
    for path, nested in _walk(hook, "", ()):
        if id(nested) in paths:
            raise CommHookError(
                f"{nested!r} is both {paths[id(nested)]} and {path!r} of {hook!r}, and would mix "
                "their states; make a hook for each of them, e.g. with "
                "commhooks.create(hook.to_config())"
            )
        paths[id(nested)] = repr(path) if path else "the outermost hook"


def _walk(hook: CommHook, path: str, outer: tuple[CommHook, ...]) -> Iterator[tuple[str, CommHook]]:
    if any(hook is other for other in outer):
        raise CommHookError(f"{outer[0]!r} is a hook around itself: it is found again at {path!r}")
    yield path, hook
    for name, nested in hook.nested().items():
        yield from _walk(nested, f"{path}.{name}" if path else name, (*outer, hook))


def _check_depth(value: Any, path: str, outer: tuple[int, ...]) -> None:
    if not isinstance(value, Mapping | list | tuple):
        return
    if id(value) in outer:
        error = CommHookOptionError(f"{path}: expected a config, found one that contains itself")
        error.path = path
        raise error
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        _check_depth(item, f"{path}.{key}" if path else str(key), (*outer, id(value)))
