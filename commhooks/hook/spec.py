"""Parse hooks from text, as on the command line.

::

    bf16                                             a name
    powersgd:rank=4,start_step=0                     a name and options
    error_feedback:inner=topk                        a hook in a hook, by name
    error_feedback:inner=(topk:density=0.001)        a hook in a hook, with options
    schedule:stages=[[0,"allreduce"],[50,"int4"]]    a value in JSON
    {"name": "powersgd", "rank": 4}                  a config in JSON

In a list of hooks, ``option=value`` belongs to the preceding hook, so
``bf16,powersgd:rank=4,start_step=0,int8`` is a list of three hooks.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from commhooks.errors import CommHookError, CommHookOptionError, reason_of
from commhooks.hook.base import CommHook
from commhooks.hook.registry import create

__all__ = ["HookSpec", "parse_hook_spec", "parse_hook_specs", "split_hook_specs"]

_OPTION = re.compile(r"\s*(\w+)\s*=(.*)", re.DOTALL)
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class HookSpec:
    """The config of a hook, and the text from which it was parsed."""

    text: str
    config: Mapping[str, Any]

    def create(self) -> CommHook:
        """Make a new hook."""
        return create(self.config)

    def __str__(self) -> str:
        return self.text


def parse_hook_spec(text: str) -> HookSpec:
    """Parse one hook, and check that :func:`commhooks.create` can make it.

    Raises:
        UnknownHookError, CommHookOptionError: the errors of ``create``, preceded by the text.
        CommHookOptionError: the text does not have one of the forms above.
    """
    spec = HookSpec(text.strip(), _config(text.strip(), text.strip()))
    try:
        spec.create()
    except CommHookError as error:
        raise type(error)(f"hook {spec.text!r}: {error}") from error
    return spec


def parse_hook_specs(
    hooks: Iterable[str | HookSpec],
) -> tuple[list[HookSpec], dict[str, str]]:
    """Parse each hook once, and return those that can be made and, by text, why others cannot.

    Raises the error of :func:`parse_hook_spec` for the first hook if none of several can be made.
    """
    specs: dict[str, HookSpec] = {}
    reasons: dict[str, str] = {}
    errors: list[Exception] = []
    for hook in hooks:
        try:
            spec = parse_hook_spec(hook) if isinstance(hook, str) else hook
            specs[spec.text] = spec
        except Exception as error:  # other packages' hooks may raise anything
            reasons[str(hook).strip()] = reason_of(error)
            errors.append(error)
    if errors and not specs:
        raise errors[0]
    return list(specs.values()), reasons


def split_hook_specs(text: str) -> list[str]:
    """Split hooks that are separated by commas. Raises CommHookOptionError for open brackets.

    Hooks that cannot be made are not an error yet: see :func:`parse_hook_specs`.
    """
    texts: list[str] = []
    for piece in _split(text, ",", text):
        if not piece.strip():
            raise _ill_formed(text, "'' is not a name")
        if texts and _OPTION.fullmatch(piece):
            texts[-1] += f",{piece}"
        else:
            texts.append(piece)
    return texts


def _config(text: str, whole: str) -> dict[str, Any]:
    if text.startswith("{"):
        config = _json(text, whole)
        assert isinstance(config, dict)
        return config
    name, colon, options = text.partition(":")
    if not re.fullmatch(r"[\w.-]+", name):
        raise _ill_formed(whole, f"{name!r} is not a name")
    pieces = _split(options, ",", whole) if colon else []
    config = {"name": name}
    for piece in pieces:
        match = _OPTION.fullmatch(piece)
        if match is None:
            raise _ill_formed(whole, f"{piece!r} is not option=value")
        option, value = match.groups()
        if option in config:
            raise _ill_formed(whole, f"{option!r} is given twice")
        config[option] = _value(value.strip(), whole)
    return config


def _value(text: str, whole: str) -> Any:
    if text.startswith("("):
        return _config(text[1:-1], whole)
    if text.startswith(("[", "{", '"')):
        return _json(text, whole)
    try:
        return json.loads(text)  # a number, true, false or null
    except ValueError:
        return text


def _json(text: str, whole: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _ill_formed(whole, f"{text!r} is not JSON: {error}") from None


def _split(text: str, separator: str, whole: str) -> list[str]:
    """Split at each ``separator`` that is outside of brackets and quotes."""
    pieces, start, closers, quoted = [], 0, [], False
    for position, character in enumerate(text):
        if character == '"' and text[position - 1 : position] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif character in _OPENING:
            closers.append(_CLOSING[_OPENING.index(character)])
        elif character in _CLOSING:
            if not closers or closers.pop() != character:
                raise _ill_formed(whole, f"{character!r} closes nothing")
        elif character == separator and not closers:
            pieces.append(text[start:position])
            start = position + 1
    missing = '"' if quoted else "".join(closers[-1:])
    if missing:
        raise _ill_formed(whole, f"{missing!r} is missing")
    return [*pieces, text[start:]]


def _ill_formed(whole: str, reason: str) -> CommHookOptionError:
    return CommHookOptionError(
        f"hook {whole!r}: {reason}; expected a hook as in bf16, powersgd:rank=4,start_step=0, "
        "error_feedback:inner=(topk:density=0.01) or JSON"
    )
