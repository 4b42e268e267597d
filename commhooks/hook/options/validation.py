"""Check the options of a hook, the fields of its dataclass, against their annotations.

types.py says what a type accepts, and constraints.py has the limits, such as ``Ge(1)``.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterable
from typing import Any

from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.options.types import constraints_of, convert, type_name

__all__ = ["OptionInfo", "check_names", "describe_options", "option_names", "validate"]


@dataclasses.dataclass(frozen=True)
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


def option_names(kind: type) -> list[str]:
    """Return the names of the options of a hook class, in the order of its constructor."""
    return [field.name for field in _fields(kind)]


def describe_options(kind: type) -> tuple[OptionInfo, ...]:
    """Return a description of each option of a hook class."""
    hints, texts = _hints(kind), _texts(kind)
    return tuple(
        _describe(field, hints[field.name], texts.get(field.name, "")) for field in _fields(kind)
    )


def check_names(hook: str, kind: type, given: Iterable[str]) -> None:
    """Raise CommHookOptionError if a name in ``given`` is unknown, or a required one is missing."""
    names = option_names(kind)
    given = set(given)
    if unknown := sorted(given.difference(names)):
        raise _option_error(
            unknown[0],
            f"hook {hook!r} has no option {unknown[0]!r}"
            + _instead(unknown[0], names)
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
    for name, hint in _hints(type(hook)).items():  # type: ignore[arg-type]
        found = getattr(hook, name)
        try:
            value = convert(hint, found, name)
        except CommHookError:
            raise  # by a hook inside the option; the text says so
        except ValueError as error:
            raise _type_error(hook, name, found, str(error)) from None
        object.__setattr__(hook, name, value)  # the subclass may be frozen


def _instead(unknown: str, names: list[str]) -> str:
    near = difflib.get_close_matches(unknown, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


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
        except (OSError, SyntaxError):
            continue
        assert isinstance(source, ast.ClassDef)
        for line, below in itertools.pairwise(source.body):
            match line, below:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def _describe(field: dataclasses.Field[Any], hint: Any, text: str) -> OptionInfo:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    required = _is_required(field)
    shown = None if required else default
    return OptionInfo(field.name, type_name(hint), shown, required, constraints_of(hint), text)


def _type_error(hook: object, name: str, found: object, reason: str) -> CommHookOptionError:
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
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in _fields(kind)}
