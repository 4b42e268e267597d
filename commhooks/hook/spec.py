"""Turn what users name hooks by into specs: text as on the command line, and Python objects.

::

    bf16                                             a name
    my_module:MyHook                                 a class, or in a script: train.py:MyHook
    powersgd:rank=4,start_step=0                     a name and options
    my_module:MyHook:rank=4                          a class and options
    error_feedback:inner=topk                        a hook in a hook, by name
    error_feedback:inner=(topk:density=0.001)        a hook in a hook, with options
    schedule:stages=[[0,"allreduce"],[50,"int4"]]    a value in JSON
    {"name": "powersgd", "rank": 4}                  a config in JSON

In a list of hooks, ``option=value`` belongs to the preceding hook, so
``bf16,powersgd:rank=4,start_step=0,int8`` is a list of three hooks, and ``powersgd,rank=4`` is one.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

from commhooks.errors import CommHookError, CommHookOptionError, reason_of
from commhooks.hook.base import CommHook, tree
from commhooks.hook.options import check_option_names
from commhooks.hook.registry import available, create, portable_config

_NAME = re.compile(
    r"""([\w./-]+ (?::[A-Za-z_][\w.]*(?=\s*(?:$|[:,])))?)  # a name, or module:Class
        (?:[:,](.*))?                                      # options""",
    re.DOTALL | re.VERBOSE,
)
_OPTION = re.compile(r"\s*(\w+)\s*=(.*)", re.DOTALL)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class HookSpec:
    """A hook to be made in other processes: its config, and a text for tables and messages."""

    text: str
    config: Mapping[str, Any]

    def create(self) -> CommHook:
        """Make a new hook."""
        return create(self.config)

    def __str__(self) -> str:
        return self.text


HookLike: TypeAlias = (
    str | HookSpec | CommHook | type[CommHook] | Mapping[str, Any] | tuple[str, Mapping[str, Any]]
)
"""A hook as users name it: a text, a hook, a class, a config, or a name and its options."""


def hook_spec(hook: HookLike) -> HookSpec:
    """Return the spec of a hook, after checking that :func:`commhooks.create` can make it.

    Raises:
        UnknownHookError, CommHookOptionError: the errors of ``create``, preceded by the hook.
        CommHookOptionError: the hook has none of the forms of ``HookLike``.
    """
    match hook:
        case HookSpec():
            return hook
        case str():
            return _spec_of_text(hook.strip())
        case CommHook():
            made = hook
        case type() if issubclass(hook, CommHook):
            check_option_names(hook.name, hook, ())
            made = hook()
        case (str(name), Mapping() as options):
            made = create(name, **options)
        case Mapping():
            made = create(hook)
        case _:
            raise CommHookOptionError(
                "expected a hook: a text such as powersgd:rank=4, a CommHook or its class, a "
                f"config, or (name, options); found {hook!r}"
            )
    spec = HookSpec(spec_of(made), portable_config(made))
    spec.create()
    return spec


def config_of(hook: HookLike) -> Mapping[str, Any]:
    """Return a config as it is, or that of the spec of a hook."""
    return hook if isinstance(hook, Mapping) else hook_spec(hook).config


def spec_of(hook: CommHook) -> str:
    """Return a hook as on the command line, with the options that are not the default."""
    options = hook.to_config()
    del options["name"]
    with suppress(CommHookError):  # it has options without a default
        usual = create(hook.name).to_config()
        options = {name: value for name, value in options.items() if value != usual[name]}
    texts = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    return f"{hook.name}:{','.join(texts)}" if texts else hook.name


def parse_hook_specs(hooks: Iterable[HookLike]) -> tuple[list[HookSpec], dict[str, str]]:
    """Return the spec of each hook that can be made, once, and by text why others cannot.

    Raises the error of :func:`hook_spec` for the first hook if none of several can be made.
    """
    specs: dict[str, HookSpec] = {}
    reasons: dict[str, str] = {}
    errors: list[Exception] = []
    for hook in hooks:
        try:
            spec = hook_spec(hook)
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
    for piece in _split(text, text):
        if not piece.strip():
            raise _ill_formed(text, "'' is not a name")
        if texts and _OPTION.fullmatch(piece):
            texts[-1] += f",{piece}"
        else:
            texts.append(piece)
    return texts


def _spec_of_text(text: str) -> HookSpec:
    config = _config(text, text)
    try:
        hook = create(config)
    except CommHookError as error:
        raise type(error)(f"hook {text!r}: {error}") from error
    if not all(type(each).__module__.startswith("commhooks.") for each in tree(hook)):
        config = portable_config(hook)
    if not text.startswith("{"):
        text = ":".join(part for part in _named(text, text) if part is not None)
    return HookSpec(text, config)


def _named(text: str, whole: str) -> tuple[str, str | None]:
    """Split a name and its options, which are None if there is no separator."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise _ill_formed(whole, f"{text.partition(':')[0]!r} is not a name")
    name, colon, attribute = match[1].partition(":")
    if colon and name in available() and not _is_module(name):
        raise _ill_formed(whole, f"{attribute!r} is not option=value")
    return match[1], match[2]


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:  # of the package that the dots before it stand for
        return False


def _config(text: str, whole: str) -> dict[str, Any]:
    if text.startswith("{"):
        config = _json(text, whole)
        assert isinstance(config, dict)
        return config
    name, options = _named(text, whole)
    config = {"name": name}
    for piece in [] if options is None else _split(options, whole):
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


def _split(text: str, whole: str) -> list[str]:
    """Split at each comma that is outside of brackets and quotes."""
    pieces, start, closers, quoted = [], 0, [], False
    for position, character in enumerate(text):
        if character == '"' and text[position - 1 : position] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif character in _CLOSING:
            closers.append(_CLOSING[character])
        elif character in _CLOSING.values():
            if not closers or closers.pop() != character:
                raise _ill_formed(whole, f"{character!r} closes nothing")
        elif character == "," and not closers:
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
