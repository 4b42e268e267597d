"""Which parameters a rule of ``route`` fits: a pattern for names, or a predicate."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Annotated, TypeAlias

from torch import Tensor

from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.options import Made

__all__ = ["Pattern", "Predicate", "Rule", "choose"]

Predicate: TypeAlias = Callable[[str, Tensor], bool]
"""Whether a rule fits a parameter, by its name and itself."""

_PREDICATE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")  # module:function


def _to_name(rule: object) -> object:
    """A predicate as "module:function", so that it survives JSON."""
    if not callable(rule):
        return rule
    name = f"{getattr(rule, '__module__', '')}:{getattr(rule, '__qualname__', '')}"
    if not _PREDICATE.fullmatch(name):
        raise ValueError(
            "a predicate is stored by its name, so it has to be a function of a module, not one "
            "that was made inside another function or by lambda"
        )
    return name


Rule: TypeAlias = Annotated[str | Predicate, Made(_to_name)]
"""As an option: whatever is given, a string is kept."""


@dataclass(frozen=True)
class Pattern:
    """A rule, and what it fits."""

    rule: str
    fits: Predicate

    @classmethod
    def of(cls, rule: str, path: str) -> "Pattern":
        """``path``: of the option, for the error of a predicate that cannot be found."""
        match = _PREDICATE.fullmatch(rule)
        if match is None:
            return cls(rule, lambda name, _: fnmatchcase(name, rule))
        module, name = match.groups()
        try:
            found = attrgetter(name)(importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise CommHookOptionError(
                f"option {path!r} of hook 'route': a rule with a colon is a predicate, "
                f"module:function, but there is no {name!r} in a module {module!r} ({error})"
            ) from error
        if not callable(found):
            raise CommHookOptionError(
                f"option {path!r} of hook 'route': expected {rule} to be a function of a "
                f"parameter's name and itself, found {found!r}"
            )
        return cls(rule, found)


def choose(
    patterns: Sequence[Pattern], parameters: Mapping[str, Tensor], *, has_default: bool
) -> dict[str, int]:
    """For each parameter the position of the first pattern that fits; their number for the default.

    Raises CommHookError for a pattern that is first for no parameter, and for a parameter that is
    left over.
    """
    fitting = {
        name: [i for i, pattern in enumerate(patterns) if pattern.fits(name, parameter)]
        for name, parameter in parameters.items()
    }
    _check_all_used(patterns, fitting)
    left = [name for name, positions in fitting.items() if not positions]
    if left and not has_default:
        raise CommHookError(f"hook 'route': no rule fits {_listed(left)}; add a rule, or a default")
    return {
        name: positions[0] if positions else len(patterns) for name, positions in fitting.items()
    }


def _check_all_used(patterns: Sequence[Pattern], fitting: Mapping[str, list[int]]) -> None:
    used = {positions[0] for positions in fitting.values() if positions}
    for i, pattern in enumerate(patterns):
        if i in used:
            continue
        if fits := [name for name, positions in fitting.items() if i in positions]:
            raise CommHookError(
                f"hook 'route': earlier rules take all that rule {pattern.rule!r} fits, "
                f"{_listed(fits)}; move it to the front, or remove it"
            )
        raise CommHookError(
            f"hook 'route': rule {pattern.rule!r} fits no parameter of the model, which has "
            f"{_listed(list(fitting))}"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
