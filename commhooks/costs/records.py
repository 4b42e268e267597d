"""Read dataclasses from JSON: the inverse of :func:`dataclasses.asdict`."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Kind = TypeVar("_Kind")


def from_json(kind: type[_Kind], data: Any) -> _Kind:
    """Return an instance of a dataclass, in which dataclasses, tuples and mappings may be nested.

    Missing fields have their defaults. Data of another form raises AttributeError, KeyError,
    TypeError or ValueError.
    """
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(hint: Any, data: Any) -> Any:
    origin, members = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return from_json(hint, data)  # type: ignore[arg-type]  # it is a class
    if origin is tuple and members[-1] is not ...:
        return tuple(map(_value, members, data))
    if origin in (tuple, list, Sequence):
        return (tuple if origin is tuple else list)(_value(members[0], item) for item in data)
    if origin is Mapping:  # JSON's keys are strings
        return {members[0](key): _value(members[1], item) for key, item in data.items()}
    return data
