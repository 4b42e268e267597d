"""Whether values are of the types that annotations state, and how these read.

Strictly: no number is made from a string, and none from a bool; but an int will do for a float.
"""

import operator
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union

__all__ = ["checked", "constraints_of", "type_name"]

_CONSTRAINTS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
    "multiple_of": ("a multiple of", lambda value, of: value % of == 0),
    "min_length": ("of length >=", lambda value, length: len(value) >= length),
}
"""By the field of commhooks.hook.options.constraints with the limit: how it reads, and whether it
is kept.
"""


def checked(hint: Any, value: Any) -> Any:
    """The value, or a float in place of an int. Raises ValueError if it is not of the type."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _constrained(members[0], members[1:], value)
    if origin in (Union, types.UnionType):
        return _of_any(members, value)
    if origin is Literal:
        if not any(value == member and type(value) is type(member) for member in members):
            raise ValueError(f"it is none of {', '.join(map(repr, members))}")
        return value
    if origin in (list, tuple, dict):
        return _with_items(hint, value)
    kind = type(None) if hint is None else origin or hint
    if not isinstance(kind, type):  # Any, a type variable: nothing to look at
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return _as_float(value)
    _check_instance(kind, hint, value)
    return value


def type_name(hint: Any) -> str:
    """For people: without modules and constraints."""
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
    """For people: ">= 1"."""
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


def _constrained(hint: Any, extras: tuple[Any, ...], value: Any) -> Any:
    value = checked(hint, value)
    for extra in extras:
        for field, limit in _limits(extra):
            text, holds = _CONSTRAINTS[field]
            if not holds(value, limit):
                raise ValueError(f"it is not {text} {limit}")
    return value


def _of_any(hints: tuple[Any, ...], value: Any) -> Any:
    """By the first type that takes the value as it is, or else by the first that takes it."""
    found, reasons = [], []
    for hint in hints:
        try:
            found.append(checked(hint, value))
        except ValueError as error:
            reasons.append(str(error))
    if not found:
        raise ValueError(", and ".join(reasons))
    return next((one for one in found if one is value), found[0])


def _with_items(hint: Any, value: Any) -> Any:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    _check_instance(origin, origin, value)
    if origin is dict:
        return {_item(members[0], key, "key", key): _item(members[1], item, "item", key)
                for key, item in value.items()}  # fmt: skip
    if origin is list or members[-1:] == (Ellipsis,):
        members = members[:1] * len(value)
    if len(members) != len(value):
        raise ValueError(f"it has {len(value)} items instead of {len(members)}")
    pairs = enumerate(zip(members, value, strict=True))
    return origin(_item(member, item, "item", i) for i, (member, item) in pairs)


def _item(hint: Any, item: Any, what: str, name: object) -> Any:
    try:
        return checked(hint, item)
    except ValueError as error:
        raise ValueError(f"{what} {name!r}: {error}") from None


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError("it is too large for a float") from None


def _check_instance(kind: type, hint: Any, value: Any) -> None:
    is_bool = isinstance(value, bool) and kind in (int, float)
    if is_bool or not isinstance(value, kind):
        raise ValueError(f"it is no {type_name(hint)}")
