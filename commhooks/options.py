"""Checks a hook's options, which are the fields of its dataclass, against their annotations.

``Annotated[int, Ge(1)]`` (annotated_types) states a range. Types are taken strictly: no number is
made from a string, and none from a bool. What JSON has no type for may be given in another way, see
:mod:`commhooks.option_values`.
"""

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from commhooks.errors import CommHookOptionError
from commhooks.option_values import ParseError, parse, with_instances

__all__ = ["OptionInfo", "check_names", "describe_options", "option_names", "validate"]


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """One option. ``type`` and ``constraints`` as text; ``default`` is None where ``required``."""

    name: str
    type: str
    default: Any
    required: bool
    constraints: tuple[str, ...] = ()

    def __str__(self) -> str:
        value = "" if self.required else f" = {self.default!r}"
        ranges = f"  ({', '.join(self.constraints)})" if self.constraints else ""
        return f"{self.name}: {self.type}{value}{ranges}"


def option_names(kind: type) -> list[str]:
    """The options of a hook class, in the order of its constructor."""
    return [field.name for field in _fields(kind)]


def describe_options(kind: type) -> tuple[OptionInfo, ...]:
    """What the options of a hook class are, for people."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(_describe(field, hints[field.name]) for field in _fields(kind))


def check_names(hook: str, kind: type, given: Iterable[str]) -> None:
    """Raises CommHookOptionError for options that the hook does not have, and for missing ones."""
    names = option_names(kind)
    given = set(given)
    if unknown := sorted(given.difference(names)):
        near = difflib.get_close_matches(unknown[0], names, n=1)
        raise _option_error(
            unknown[0],
            f"hook {hook!r} has no option {unknown[0]!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + (f" Its options are {', '.join(names)}." if names else " It has none."),
        )
    required = [field.name for field in _fields(kind) if _is_required(field)]
    if missing := [name for name in required if name not in given]:
        raise _option_error(
            missing[0],
            f"hook {hook!r} needs the option {missing[0]!r}, found {sorted(given) or 'none'}",
        )


def validate(hook: object) -> None:
    """Checks the options of a hook instance and stores the values, converted where needed."""
    for name, (hint, adapter) in _adapters(type(hook)).items():  # type: ignore[arg-type]
        found = getattr(hook, name)
        try:
            value = adapter.validate_python(parse(hint, found, name))
        except ParseError as error:
            raise _refusal(hook, name, found, str(error)) from None
        except ValidationError as error:
            reasons = "; ".join(_reason(detail) for detail in error.errors())
            raise _refusal(hook, name, found, reasons) from None
        object.__setattr__(hook, name, value)  # the subclass may be frozen


def _fields(kind: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.init]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _describe(field: dataclasses.Field[Any], hint: Any) -> OptionInfo:
    constraints: tuple[str, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *extras = typing.get_args(hint)
        constraints = tuple(_constraint(extra) for extra in extras)
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    required = _is_required(field)
    return OptionInfo(
        field.name, _type_name(hint), None if required else default, required, constraints
    )


def _constraint(extra: Any) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "a multiple of"}
    signs["min_length"] = "length >="
    for attribute, sign in signs.items():
        if hasattr(extra, attribute):
            return f"{sign} {getattr(extra, attribute)}"
    return str(extra)


def _type_name(hint: Any) -> str:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type_name(members[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type_name, members))
    if origin in (list, tuple, dict):
        return f"{origin.__name__}[{', '.join(map(_type_name, members))}]"
    if hint is type(None):
        return "None"
    if isinstance(hint, type):
        return hint.__name__
    text = str(hint).replace("typing.", "")
    return text if origin is typing.Literal else re.sub(r"(\w+\.)+", "", text)  # without modules


def _reason(detail: Any) -> str:
    return str(detail["msg"]).removeprefix("Value error, ")


def _refusal(hook: object, name: str, found: object, reason: str) -> CommHookOptionError:
    hook_name = getattr(hook, "name", type(hook).__qualname__)
    expected = next(info for info in describe_options(type(hook)) if info.name == name)
    ranges = "".join(f", {constraint}" for constraint in expected.constraints)
    return _option_error(
        name,
        f"option {name!r} of hook {hook_name!r}: expected {expected.type}{ranges}; found {found!r} "
        f"({reason})",
    )


def _option_error(name: str, text: str) -> CommHookOptionError:
    error = CommHookOptionError(text)
    error.path = name
    return error


@functools.cache
def _adapters(kind: type) -> dict[str, tuple[Any, TypeAdapter[Any]]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return {
        field.name: (
            hints[field.name],
            TypeAdapter(with_instances(hints[field.name]), config=config),
        )
        for field in _fields(kind)
    }
