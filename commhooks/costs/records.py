"""Read dataclasses from JSON: the inverse of :func:`dataclasses.asdict`."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from commhooks.hook.options import convert

_Kind = TypeVar("_Kind")


def from_json(kind: type[_Kind], data: Any) -> _Kind:
    """Return an instance of a dataclass, in which dataclasses, tuples and mappings may be nested.

    Missing fields have their defaults. Data of another form raises AttributeError, KeyError,
    TypeError or ValueError.
    """
    hints, fields = get_type_hints(kind), dict[str, Any]()
    for name, value in data.items():
        try:
            fields[name] = _value(hints[name], value, name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return kind(**fields)


def _value(hint: Any, data: Any, name: str) -> Any:
    origin, members = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return from_json(hint, data)  # type: ignore[arg-type]  # it is a class
    if origin in (tuple, list, Sequence) and isinstance(data, list | tuple):
        is_fixed = origin is tuple and members[-1] is not ...
        hints = members if is_fixed else members[:1] * len(data)
        found = (_value(each, item, name) for each, item in zip(hints, data, strict=True))
        return (tuple if origin is tuple else list)(found)
    if origin is Mapping:  # JSON's keys are strings
        return {members[0](key): _value(members[1], each, name) for key, each in data.items()}
    try:
        return convert(hint, data, name)
    except ValueError as error:
        raise ValueError(f"found {data!r}") from error
