"""Convert option values to the types that annotations state, and print these types.

Types are strict: a string never becomes a number, and a bool is not a number. An int is accepted
for a float. Where JSON has no type, another form is accepted, also inside lists, tuples and dicts:
a ``torch.dtype`` by its name, a hook by its name or config, a tuple as a list.
"""

import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union

import torch

from commhooks.errors import CommHookError
from commhooks.hook.options.constraints import Made

__all__ = ["constraints_of", "convert", "parsers", "type_name"]

_CONSTRAINTS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
    "multiple_of": ("a multiple of", lambda value, of: value % of == 0),
    "min_length": ("of length >=", lambda value, length: len(value) >= length),
}
"""The text and the check of each limit, by the field of its class in constraints.py."""


def _parse_dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


parsers: dict[type, Callable[[Any], Any]] = {torch.dtype: _parse_dtype}
"""Functions that make an instance of a type from a string or a mapping."""


def convert(hint: Any, value: Any, path: str) -> Any:
    """Return ``value``, converted where ``hint`` allows it.

    Raises:
        ValueError: the value does not have the type; the text gives the reason.
        CommHookError: the value stands for a hook that cannot be made. The text begins with the
            path of the option, which starts at ``path``.
    """
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _convert_annotated(members[0], members[1:], value, path)
    if origin in (Union, types.UnionType):
        return _convert_to_any(members, value, path)
    if origin is Literal:
        if not any(value == member and type(value) is type(member) for member in members):
            raise ValueError(f"it is not one of {', '.join(map(repr, members))}")
        return value
    if origin in (list, tuple, dict):
        return _convert_items(hint, value, path)
    kind = type(None) if hint is None else origin or hint
    if kind is Any or not isinstance(kind, type):  # or a type variable: accept everything
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return _to_float(value)
    if isinstance(value, str | Mapping):
        for base in kind.__mro__:
            if base in parsers:
                return _parse(parsers[base], value, path)
    _check_instance(kind, hint, value)
    return value


def type_name(hint: Any) -> str:
    """Return a type as users read it: without modules and constraints."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return type_name(members[0])
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_name, members))
    if origin in (list, tuple, dict):
        return f"{origin.__name__}[{', '.join(map(type_name, members))}]"
    if hint in (None, type(None)):
        return "None"
    if hint is ...:
        return "..."
    if isinstance(hint, type):
        return hint.__name__
    text = str(hint).replace("typing.", "")
    return text if origin is Literal else re.sub(r"(\w+\.)+", "", text)


def constraints_of(hint: Any) -> tuple[str, ...]:
    """Return the constraints of a type as users read them: ``(">= 1",)``."""
    if typing.get_origin(hint) is not Annotated:
        return ()
    return tuple(
        f"{_CONSTRAINTS[field][0]} {limit}"
        for extra in typing.get_args(hint)[1:]
        for field, limit in _limits(extra)
    )


def _limits(extra: Any) -> Iterator[tuple[str, Any]]:
    for field in _CONSTRAINTS:
        if (limit := getattr(extra, field, None)) is not None:
            yield field, limit


def _convert_annotated(hint: Any, extras: tuple[Any, ...], value: Any, path: str) -> Any:
    for extra in extras:
        value = extra.make(value) if isinstance(extra, Made) else value
    value = convert(hint, value, path)
    for extra in extras:
        for field, limit in _limits(extra):
            text, holds = _CONSTRAINTS[field]
            if not holds(value, limit):
                raise ValueError(f"it is not {text} {limit}")
    return value


def _convert_to_any(hints: tuple[Any, ...], value: Any, path: str) -> Any:
    """Convert to the first type that keeps the value unchanged, else the first that accepts it."""
    found, reasons = [], []
    for hint in hints:
        try:
            found.append(convert(hint, value, path))
        except CommHookError:
            raise
        except ValueError as error:
            reasons.append(str(error))
    if not found:
        raise ValueError(", and ".join(reasons))
    return next((one for one in found if one is value), found[0])


def _convert_items(hint: Any, value: Any, path: str) -> Any:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    accepted: Any = {list: list, tuple: list | tuple, dict: Mapping}[origin]
    if not isinstance(value, accepted):
        raise ValueError(f"it is not of type {type_name(origin)}")
    if origin is dict:
        return {
            _convert_item(members[0], key, "key", key, path): _convert_item(
                members[1], item, "item", key, path
            )
            for key, item in value.items()
        }
    if origin is list or members[-1:] == (Ellipsis,):
        members = members[:1] * len(value)
    if len(members) != len(value):
        raise ValueError(f"it has {len(value)} items instead of {len(members)}")
    pairs = enumerate(zip(members, value, strict=True))
    return origin(_convert_item(member, item, "item", i, path) for i, (member, item) in pairs)


def _convert_item(hint: Any, item: Any, what: str, name: object, path: str) -> Any:
    try:
        return convert(hint, item, f"{path}.{name}")
    except CommHookError:
        raise
    except ValueError as error:
        raise ValueError(f"{what} {name!r}: {error}") from None


def _to_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError("it is too large for a float") from None


def _parse(parser: Callable[[Any], Any], value: str | Mapping[str, Any], path: str) -> Any:
    """Apply a parser; put the path of the option in front of an error of an option inside it."""
    try:
        return parser(value)
    except CommHookError as error:
        whole = f"{path}.{error.path}" if error.path else path
        moved = type(error)(f"{whole}: {str(error).removeprefix(f'{error.path}: ')}")
        moved.path = whole
        raise moved from error


def _check_instance(kind: type, hint: Any, value: Any) -> None:
    is_bool = isinstance(value, bool) and kind in (int, float)
    if is_bool or not isinstance(value, kind):
        raise ValueError(f"it is not of type {type_name(hint)}")
