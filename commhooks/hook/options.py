"""The options of a hook: fields of its dataclass, checked against their annotations.

Types are strict: a string never becomes a number, and a bool is not a number. An int is accepted
for a float, and a scalar of NumPy for a number. Where JSON has no type, another form is accepted,
also inside lists, tuples and dicts: a ``torch.dtype`` by its name, a hook by its name or config, a
tuple as a list.

Limits beyond the type are written into annotations: ``Annotated[int, Limits(ge=1)]``,
``Annotated[str, Made(parse)]``. Other objects with such attributes count as well, as those of the
package annotated_types.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import operator
import re
import reprlib
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union

import numpy as np
import torch

from commhooks.errors import CommHookError, CommHookOptionError, did_you_mean

Instance = TypeVar("Instance")


# ------------------------------------------------------------------------------------------ limits


@dataclass(frozen=True)
class Limits:
    """Limits of a value: at least ``ge``, greater than ``gt``, and so on. None: no limit."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    multiple_of: int | None = None
    min_length: int | None = None
    """The fewest items of a list, tuple or dict."""


@dataclass(frozen=True)
class Made:
    """Convert the value with ``make``, which raises ValueError or CommHookError if it cannot."""

    make: Callable[[Any], Any]


# ------------------------------------------------------------------------------------------- types


_CONSTRAINTS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
    "multiple_of": ("a multiple of", lambda value, of: value % of == 0),
    "min_length": ("of length >=", lambda value, length: len(value) >= length),
}
"""The text and the check of each limit."""


def _parse_dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


_CONTAINERS = {list: list, Sequence: list, tuple: tuple, dict: dict, Mapping: dict}
"""The types that are made for those in annotations."""

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
    if origin in _CONTAINERS:
        return _convert_items(hint, value, path)
    kind = type(None) if hint is None else origin or hint
    if kind is Any or not isinstance(kind, type):  # or a type variable: accept everything
        return value
    if isinstance(value, np.generic):
        value = value.item()
    is_bool = isinstance(value, bool)
    if kind is float and isinstance(value, int) and not is_bool:
        try:
            return float(value)
        except OverflowError:
            raise ValueError("it is too large for a float") from None
    if isinstance(value, str | Mapping):
        for base in kind.__mro__:
            if base in parsers:
                return _parse(parsers[base], value, path)
    if isinstance(value, Mapping) and dataclasses.is_dataclass(kind):
        return from_json(kind, value)
    if not isinstance(value, kind) or (is_bool and kind in (int, float)):
        raise ValueError(f"it is not of type {type_name(hint)}")
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
        f"{_CONSTRAINTS[field][0]} {limit:g}"  # equal hints are one: 0.0 must read as 0
        for extra in typing.get_args(hint)[1:]
        for field, limit in _limits(extra)
    )


def _limits(extra: Any) -> Iterator[tuple[str, Any]]:
    for field in _CONSTRAINTS:
        if (limit := getattr(extra, field, None)) is not None:
            yield field, limit


def _convert_annotated(hint: Any, extras: tuple[Any, ...], value: Any, path: str) -> Any:
    for extra in extras:
        value = _parse(extra.make, value, path) if isinstance(extra, Made) else value
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
    accepted: Any = {list: list, dict: Mapping, Mapping: Mapping}.get(origin, list | tuple)
    make: Any = _CONTAINERS[origin]
    if not isinstance(value, accepted):
        raise ValueError(f"it is not of type {type_name(origin)}")
    if make is dict:
        return {
            _convert_item(members[0], key, "key", key, path): _convert_item(
                members[1], item, "item", key, path
            )
            for key, item in value.items()
        }
    if make is list or members[-1:] == (Ellipsis,):
        members = members[:1] * len(value)
    if len(members) != len(value):
        raise ValueError(f"it has {len(value)} items instead of {len(members)}")
    pairs = enumerate(zip(members, value, strict=True))
    return make(_convert_item(member, item, "item", i, path) for i, (member, item) in pairs)


def _convert_item(hint: Any, item: Any, what: str, name: object, path: str) -> Any:
    try:
        return convert(hint, item, f"{path}.{name}")
    except CommHookError:
        raise
    except ValueError as error:
        raise ValueError(f"{what} {name!r}: {error}") from None


def _parse(parser: Callable[[Any], Any], value: str | Mapping[str, Any], path: str) -> Any:
    """Apply a parser; put the path of the option in front of an error of an option inside it."""
    try:
        return parser(value)
    except CommHookError as error:
        whole = f"{path}.{error.path}" if error.path else path
        moved = type(error)(f"{whole}: {str(error).removeprefix(f'{error.path}: ')}")
        moved.path = whole
        raise moved from error


# ----------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class OptionInfo:
    """One option. ``type`` and ``constraints`` are text; ``default`` is None if ``required``.

    ``text`` is what the class says about it: the string below the field.
    """

    name: str
    type: str
    default: Any
    required: bool
    constraints: tuple[str, ...] = ()
    text: str = ""

    def __str__(self) -> str:
        value = "" if self.required else f" = {self.default!r}"
        ranges = f"  ({', '.join(self.constraints)})" if self.constraints else ""
        return f"{self.name}: {self.type}{value}{ranges}"


def hook_default(hook: str) -> Any:
    """Return the default of an option that is a hook, by its name; each instance gets its own."""
    return dataclasses.field(default=hook)


def option_names(kind: type) -> list[str]:
    """Return the names of the options of a hook class, in the order of its constructor."""
    return [field.name for field in _fields(kind)]


def describe_options(kind: type) -> tuple[OptionInfo, ...]:
    """Return a description of each option of a hook class."""
    hints, texts, found = _hints(kind), _texts(kind), list[OptionInfo]()
    for field in _fields(kind):
        name, hint, required = field.name, hints[field.name], _is_required(field)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        shown = None if required else default
        limits, text = constraints_of(hint), texts.get(name, "")
        found.append(OptionInfo(name, type_name(hint), shown, required, limits, text))
    return tuple(found)


def check_option_names(hook: str, kind: type, given: Iterable[str]) -> None:
    """Raise CommHookOptionError if a name in ``given`` is unknown, or a required one is missing."""
    names = option_names(kind)
    given = {str(name) for name in given}  # keys of a config may be anything
    if unknown := sorted(given.difference(names)):
        raise _option_error(
            unknown[0],
            f"hook {hook!r} has no option {unknown[0]!r}"
            + (did_you_mean(unknown[0], names) or ".")
            + (f" Its options are {', '.join(names)}." if names else " It has none."),
        )
    required = [field.name for field in _fields(kind) if _is_required(field)]
    if missing := [name for name in required if name not in given]:
        raise _option_error(
            missing[0],
            f"hook {hook!r} needs the option {missing[0]!r}, found {sorted(given) or 'none'}",
        )


def validate(hook: object) -> None:
    """Check the options of a hook instance, and store the values, converted where needed."""
    owner = getattr(hook, "name", type(hook).__qualname__)
    for name, hint in _hints(type(hook)).items():  # type: ignore[arg-type]
        found = getattr(hook, name)
        try:
            value = convert(hint, found, name)
        except CommHookError:
            raise  # by a hook inside the option; the text says so
        except ValueError as error:
            expected = ", ".join((type_name(hint), *constraints_of(hint)))
            problem = f"expected {expected}; found {found!r} ({error})"
            raise _option_error(name, f"option {name!r} of hook {owner!r}: {problem}") from None
        object.__setattr__(hook, name, value)  # the subclass may be frozen


def _fields(kind: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.init]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    """Return the strings below the fields of a class and its bases, whose source must be there."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, SyntaxError, TypeError):  # TypeError: the module is not in sys.modules
            continue
        assert isinstance(source, ast.ClassDef)
        for line, below in itertools.pairwise(source.body):
            match line, below:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def _option_error(name: str, text: str) -> CommHookOptionError:
    error = CommHookOptionError(text)
    error.path = name
    return error


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in _fields(kind)}


# ------------------------------------------------------------------------------------------ values


def to_json(value: Any) -> Any:
    """Return an option's value in JSON's types, which the option accepts in place of the value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_config"):
        return value.to_config()
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[Instance], data: Mapping[str, Any]) -> Instance:
    """Return an instance of a dataclass from JSON's types: the inverse of ``dataclasses.asdict``.

    Missing fields have their defaults. Data of another form raises KeyError, TypeError or
    ValueError.
    """
    hints, fields = typing.get_type_hints(kind, include_extras=True), dict(data)
    for name, value in fields.items():
        try:
            fields[name] = convert(hints[name], value, name)
        except ValueError as error:
            raise ValueError(f"{name}: found {reprlib.repr(value)}: {error}") from None
    return kind(**fields)


def instances_in(
    value: Any, kind: type[Instance], path: str = ""
) -> Iterator[tuple[str, Instance]]:
    """Yield the instances of ``kind`` in a value with their paths: "inner", "stages.1.1"."""
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, list | tuple | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from instances_in(item, kind, f"{path}.{key}" if path else str(key))
