"""Checks a hook's options, which are the fields of its dataclass, against their annotations.

``Annotated[int, Ge(1)]`` (annotated_types) states a range. Types are taken strictly: no number is
made from a string, and none from a bool. A ``torch.dtype`` may be given by its name, so that
options survive JSON.
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Union

import torch
from pydantic import BeforeValidator, ConfigDict, InstanceOf, TypeAdapter, ValidationError

from commhooks.errors import CommHookOptionError

__all__ = ["OptionInfo", "check_names", "describe_options", "option_names", "to_json", "validate"]


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
        raise CommHookOptionError(
            f"hook {hook!r} has no option {unknown[0]!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + (f" Its options are {', '.join(names)}." if names else " It has none.")
        )
    required = [field.name for field in _fields(kind) if _is_required(field)]
    if missing := [name for name in required if name not in given]:
        raise CommHookOptionError(
            f"hook {hook!r} needs the option {missing[0]!r}, found {sorted(given) or 'none'}"
        )


def validate(hook: object) -> None:
    """Checks the options of a hook instance and stores the values, converted where needed."""
    hook_name = getattr(hook, "name", type(hook).__qualname__)
    for name, adapter in _adapters(type(hook)).items():  # type: ignore[arg-type]
        found = getattr(hook, name)
        try:
            value = adapter.validate_python(found)
        except ValidationError as error:
            reasons = "; ".join(_reason(detail) for detail in error.errors())
            expected = next(info for info in describe_options(type(hook)) if info.name == name)
            ranges = "".join(f", {constraint}" for constraint in expected.constraints)
            raise CommHookOptionError(
                f"option {name!r} of hook {hook_name!r}: expected {expected.type}{ranges}; "
                f"found {found!r} ({reasons})"
            ) from None
        object.__setattr__(hook, name, value)  # the subclass may be frozen


def to_json(value: Any) -> Any:
    """An option's value in JSON's types; :func:`validate` turns it back."""
    if isinstance(value, torch.dtype):
        return _dtype_name(value)
    if hasattr(value, "to_config"):
        return value.to_config()
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


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
    for attribute, sign in signs.items():
        if hasattr(extra, attribute):
            return f"{sign} {getattr(extra, attribute)}"
    return str(extra)


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _reason(detail: Any) -> str:
    return str(detail["msg"]).removeprefix("Value error, ")


@functools.cache
def _adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return {
        field.name: TypeAdapter(_with_dtypes(hints[field.name]), config=config)
        for field in _fields(kind)
    }


def _parse_dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {value!r}")
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_Dtype = Annotated[InstanceOf[torch.dtype], BeforeValidator(_parse_dtype)]


def _with_dtypes(hint: Any) -> Any:
    """The annotation, with dtypes that may be given by name."""
    if hint is torch.dtype:
        return _Dtype
    origin = typing.get_origin(hint)
    if origin is Annotated:
        inner, *extras = typing.get_args(hint)
        return Annotated[(_with_dtypes(inner), *extras)]
    if origin in (Union, types.UnionType):
        return Union[tuple(_with_dtypes(member) for member in typing.get_args(hint))]  # noqa: UP007
    return hint
