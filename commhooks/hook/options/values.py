"""Values of options, as they are and in JSON's types.

A ``torch.dtype`` may be given by its name, a hook by its name or config, and a tuple as a list;
inside lists, tuples and dicts as well.
"""

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, Union

import torch

from commhooks.errors import CommHookError
from commhooks.hook.options.constraints import Made

__all__ = ["ParseError", "instances_in", "parse", "parsers", "to_json"]

Instance = TypeVar("Instance")


class ParseError(ValueError):
    """There is nothing of this name."""


def _parse_dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ParseError(f"torch has no dtype {name!r}")
    return dtype


parsers: dict[type, Callable[[Any], Any]] = {torch.dtype: _parse_dtype}
"""What makes an instance of a type of a string or a dict."""


def parse(hint: Any, value: Any, path: str) -> Any:
    """The value, with instances in place of what stands for them.

    Errors of options inside it say at which path they are.
    """
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        for extra in members[1:]:
            value = extra.make(value) if isinstance(extra, Made) else value
        return parse(members[0], value, path)
    if origin in (Union, types.UnionType):
        for member in members:
            value = parse(member, value, path)
        return value
    if origin in (list, tuple, dict):
        return _parse_items(hint, value, path)
    kind = _parsed_kind(hint)
    if kind is None or not isinstance(value, str | Mapping):
        return value
    try:
        return parsers[kind](value)
    except CommHookError as error:
        raise _at(path, error) from error


def to_json(value: Any) -> Any:
    """An option's value in JSON's types; :func:`parse` turns it back."""
    if isinstance(value, torch.dtype):
        return _dtype_name(value)
    if hasattr(value, "to_config"):
        return value.to_config()
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def instances_in(
    value: Any, kind: type[Instance], path: str = ""
) -> Iterator[tuple[str, Instance]]:
    """Those in an option's value, with where they are: "inner", "stages.1.1"."""
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from instances_in(item, kind, _joined(path, key))


def _parse_items(hint: Any, value: Any, path: str) -> Any:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict and isinstance(value, Mapping):
        return {key: parse(members[1], item, _joined(path, key)) for key, item in value.items()}
    if origin is list and isinstance(value, list):
        return [parse(members[0], item, _joined(path, i)) for i, item in enumerate(value)]
    if origin is tuple and isinstance(value, list | tuple):
        is_uniform = members[-1:] == (Ellipsis,)
        hints = [members[0]] * len(value) if is_uniform else members
        if len(hints) != len(value):
            return tuple(value)
        items = enumerate(zip(hints, value, strict=True))
        return tuple(parse(hint, item, _joined(path, i)) for i, (hint, item) in items)
    return value


def _at(path: str, error: CommHookError) -> CommHookError:
    """The error of an option within an option, with the whole path in front, once."""
    whole = _joined(path, error.path) if error.path else path
    moved = type(error)(f"{whole}: {str(error).removeprefix(f'{error.path}: ')}")
    moved.path = whole
    return moved


def _parsed_kind(hint: Any) -> type | None:
    if not isinstance(hint, type) or typing.get_origin(hint) is not None:
        return None
    return next((kind for kind in hint.__mro__ if kind in parsers), None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
