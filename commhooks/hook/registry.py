"""Find hooks by name. Other packages add hooks by the entry-point group ``commhooks.hooks``."""

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from commhooks.errors import CommHookError, CommHookOptionError, UnknownHookError, did_you_mean
from commhooks.hook.base import CommHook
from commhooks.hook.fidelity import Fidelity, fidelity_of
from commhooks.hook.options import OptionInfo, check_option_names, describe_options, parsers
from commhooks.hook.references import load_reference, reference_to
from reducer.errors import expect

ENTRY_POINTS = "commhooks.hooks"

Kind = TypeVar("Kind", bound=type[CommHook])

_hooks: dict[str, type[CommHook]] = {}
_declared: dict[str, str] = {}
"""By name: ``package.module:Class``. Importing the module registers the hook."""


@dataclass(frozen=True)
class HookInfo:
    """The description of a hook class."""

    name: str
    summary: str
    options: tuple[OptionInfo, ...]
    lossless: bool
    consensus: bool
    backends: tuple[str, ...]
    wire: str
    paper: str
    fidelity: Fidelity | None = None
    """The change of the final loss; None if not measured, and for hooks of other packages."""
    family: str = ""
    """The folder of the hook in commhooks/algorithms; empty for hooks of other packages."""
    needs: tuple[str, ...] = ()
    """Requirements besides the name: options without a default, in backquotes, and others."""

    def __str__(self) -> str:
        kind = "lossless" if self.lossless else "lossy"
        if self.lossless and any("CommHook" in option.type for option in self.options):
            kind = "as lossless as its hooks"
        lines = [f"{self.name} ({kind}; {', '.join(self.backends)}): {self.summary}"]
        for option in self.options:
            lines += [f"  {option}", *_wrapped(option.text)]
        lines += [f"  needs: {', '.join(self.needs)}"] if self.needs else []
        lines += [f"  wire: {self.wire}"] if self.wire else []
        if self.fidelity is not None:
            lines.append(f"  validation loss, to plain averaging's: {self.fidelity}")
        lines += [f"  {self.paper}"] if self.paper else []
        return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(text, 94, initial_indent=indent, subsequent_indent=indent)


def register_hook(name: str, *, override: bool = False) -> Callable[[Kind], Kind]:
    """Make a hook available under ``name``: a class decorator, above ``@dataclass``.

    Raises CommHookError if the class is not a hook, if the name cannot be written on a command
    line, or if it is taken and ``override`` is false; TypeError without a name.
    """
    expect(str, name=name)

    def register(kind: Kind) -> Kind:
        _add(name, kind, override=override)
        return kind

    return register


def declare(hooks: Mapping[str, str]) -> None:
    """Declare hooks by name and ``package.module:Class``, imported when they are first used."""
    _declared.update(hooks)


def create(hook: str | Mapping[str, Any], /, **options: Any) -> CommHook:
    """Make a hook from its name and options, or from a config that ``to_config()`` returned.

    The name of a class that is not registered is ``package.module:Class``, or ``file.py:Class``.
    ``options`` override those of a config. An option that is a hook accepts its name or config:
    ``{"name": "error_feedback", "inner": {"name": "topk", "density": 0.01}}``.

    Raises:
        UnknownHookError: no hook has this name; the text lists all names, and the nearest one.
        CommHookOptionError: an option is unknown, missing, has the wrong type or is out of range,
            or ``hook`` is neither a name nor a config. The text of an error of a nested hook begins
            with the path of the option: "inner.density: ...".
    """
    if isinstance(hook, Mapping):
        _refuse_circles(hook, "", ())
        config = dict(hook)
        name = config.pop("name", None)
        if not isinstance(name, str):
            raise CommHookOptionError(
                f"the config of a hook needs its name: "
                f"expected {{'name': ..., option: ...}}, found {hook}"
            )
        hook, options = name, config | options
    kind = _find(hook)
    check_option_names(hook, kind, options)
    return kind(**options)


def hook_of(hook: str | Mapping[str, Any] | CommHook, options: Mapping[str, Any]) -> CommHook:
    """Return ``hook`` if it is a hook, and otherwise what :func:`create` makes of it.

    Raises CommHookOptionError if there are options beside a hook, and what :func:`create` raises.
    """
    if not isinstance(hook, CommHook):
        return create(hook, **options)
    if options:
        raise CommHookOptionError(
            f"{hook!r} has its options already; found additional options {sorted(options)}"
        )
    return hook


def available() -> list[str]:
    """Return the sorted names of all hooks, including those of other installed packages."""
    return sorted({*_hooks, *_declared, *_provided()})


def declared_candidates() -> list[str]:
    """Return the sorted names of the hooks with ``is_candidate`` that can be loaded."""
    names = []
    for name in available():
        with suppress(CommHookError):  # another package is broken
            if _find(name).is_candidate is True:
                names.append(name)
    return names


def describe(name: str) -> HookInfo:
    """Return the description of the hook of this name: its summary, options and costs."""
    kind = _find(name)
    document = inspect.getdoc(kind) or ""
    options = describe_options(kind)
    is_own = _is_own(kind)
    return HookInfo(
        name=name,
        summary=document.partition("\n")[0],
        options=options,
        lossless=kind.lossless,
        consensus=kind.consensus,
        backends=kind.backends,
        wire=kind.wire,
        paper=kind.paper,
        fidelity=fidelity_of(name) if is_own else None,
        family=kind.__module__.split(".")[2] if is_own else "",
        needs=(
            *(f"`{option.name}`" for option in options if option.required),
            *kind.needs,
        ),
    )


def portable_config(hook: CommHook) -> dict[str, Any]:
    """Return the config by which processes that have imported no module of the user make a hook."""
    config: dict[str, Any] = _portable(hook.to_config())
    return config


def _portable(value: Any) -> Any:
    if isinstance(value, list):
        return [_portable(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _portable(item) for key, item in value.items()}
    kind = _hooks.get(str(found.get("name")))
    if kind is not None and not _is_own(kind) and found["name"] not in _provided():
        with suppress(CommHookError):  # whatever registers it must be imported there
            found["name"] = reference_to(kind)
    return found


def _is_own(kind: type[CommHook]) -> bool:
    return kind.__module__.startswith("commhooks.algorithms.")


def _add(name: str, kind: Any, *, override: bool) -> None:
    _check_class(name, kind)
    if not re.fullmatch(r"[\w.-]+", name):
        raise CommHookError(
            f"hook {name!r}: expected a name of letters, digits, '_', '-' and '.', so that it can "
            "be written in a spec such as powersgd:rank=4"
        )
    if f"{kind.__module__}:{kind.__qualname__}" != _declared.get(name):
        _load_declared(name)
    taken = _hooks.get(name)
    if taken is not None and not override and not _is_same(taken, kind):
        raise CommHookError(
            f"hook {name!r} is already registered, by {taken.__module__}.{taken.__qualname__}; "
            "choose another name, or pass override=True to replace it"
        )
    kind.name = name
    _hooks[name] = kind


def _check_class(name: str, kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, CommHook)):
        raise CommHookError(f"hook {name!r}: expected a subclass of CommHook, found {kind!r}")
    if kind.reduce is CommHook.reduce:
        raise CommHookError(
            f"hook {name!r}: expected {kind.__qualname__} to have a method `async def reduce(self, "
            "bucket, comm)` that returns the average, found none"
        )
    if inspect.get_annotations(kind) and "__dataclass_fields__" not in kind.__dict__:
        raise CommHookError(
            f"hook {name!r}: the annotations of {kind.__qualname__} are not options yet; put "
            "@dataclass below @register_hook"
        )


def _is_same(taken: type, kind: type) -> bool:
    """Return whether the module was loaded again, and this is the same class."""
    return (taken.__module__, taken.__qualname__) == (kind.__module__, kind.__qualname__)


def _find(name: str) -> type[CommHook]:
    if not isinstance(name, str):
        raise CommHookOptionError(f"expected the name of a hook or its config, found {name!r}")
    if ":" in name:
        return _load_class(name)
    _load_declared(name)
    if name not in _hooks and name in (provided := _provided()):
        _load(provided[name])
    if name in _hooks:
        return _hooks[name]
    names = available()
    raise UnknownHookError(
        f"no hook is named {name!r}"
        + (did_you_mean(str(name), names) or ".")
        + f" Available: {', '.join(names)}."
    )


def _load_declared(name: str) -> None:
    if name not in _hooks and name in _declared:
        kind = load_reference(_declared[name])  # its module registers it
        _hooks.setdefault(name, kind)


def _load_class(reference: str) -> type[CommHook]:
    try:
        kind = load_reference(reference)
    except CommHookError as error:
        name, _, spec = reference.partition(":")
        if name not in available():
            raise UnknownHookError(str(error)) from error
        given = "".join(f", {each.partition('=')[0]}=..." for each in spec.split(","))
        raise UnknownHookError(
            f"expected the name of a hook, found {reference!r}; options are arguments: "
            f"create({name!r}{given})"
        ) from error
    _check_class(reference, kind)
    return kind  # type: ignore[no-any-return]


def _provided() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _load(point: EntryPoint) -> None:
    package = point.dist.name if point.dist is not None else point.value
    try:
        found = point.load()
    except Exception as error:
        raise CommHookError(
            f"hook {point.name!r} of the package {package!r} could not be loaded: {error}"
        ) from error
    if point.name not in _hooks:  # unless loading it ran @register_hook
        _add(point.name, found, override=False)


parsers[CommHook] = create


def _refuse_circles(value: Any, path: str, outer: tuple[int, ...]) -> None:
    """Raise CommHookOptionError if a config contains itself, as YAML's anchors allow."""
    if not isinstance(value, Mapping | list | tuple):
        return
    if id(value) in outer:
        error = CommHookOptionError(f"{path}: expected a config, found one that contains itself")
        error.path = path
        raise error
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        _refuse_circles(item, f"{path}.{key}" if path else str(key), (*outer, id(value)))
