"""Rules of ``route``: patterns for the names of parameters, roles, or predicates."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Annotated, TypeAlias

from torch import Tensor

from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.base import Role
from commhooks.hook.options import Made

__all__ = ["Matcher", "Predicate", "Rule", "choose"]

Predicate: TypeAlias = Callable[[str, Tensor], bool]
"""Whether a rule matches a parameter, given its name and the parameter."""

_ROLES = ("@1d", "@embedding", "@output")

_PREDICATE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")  # module:function


def _to_name(rule: object) -> object:
    """Return a predicate as "module:function", which can be stored as JSON."""
    if not callable(rule):
        return rule
    name = f"{getattr(rule, '__module__', '')}:{getattr(rule, '__qualname__', '')}"
    if not _PREDICATE.fullmatch(name):
        raise ValueError(
            "a predicate is stored by its name, so it has to be a function of a module, not one "
            "that was defined inside another function or by lambda"
        )
    return name


Rule: TypeAlias = Annotated[str | Predicate, Made(_to_name)]
"""The type of the option. It is stored as a string."""


@dataclass(frozen=True)
class Matcher:
    """A rule, and whether it matches a parameter."""

    rule: str
    matches: Predicate
    may_be_unused: bool = False

    @classmethod
    def of(cls, rule: str, path: str, roles: Mapping[str, Role] | None) -> "Matcher":
        """Parse a rule. ``path`` names the option in errors, ``roles`` are of parameters."""
        if rule.startswith("@"):
            return cls(rule, _of_role(rule, path, roles), may_be_unused=True)
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
                f"parameter's name and the parameter, found {found!r}"
            )
        return cls(rule, found)


def _of_role(rule: str, path: str, roles: Mapping[str, Role] | None) -> Predicate:
    if rule not in _ROLES:
        raise CommHookOptionError(
            f"option {path!r} of hook 'route': expected one of the roles {', '.join(_ROLES)}, "
            f"found {rule!r}"
        )
    if rule == "@1d":
        return lambda _, parameter: parameter.dim() <= 1

    def has_role(name: str, _: Tensor) -> bool:
        if roles is None:
            raise CommHookError(
                f"hook 'route': rule {rule!r} needs the modules of the model, and only its "
                "parameters are known here; use patterns for their names"
            )
        return roles.get(name) == rule[1:]

    return has_role


def choose(
    matchers: Sequence[Matcher], parameters: Mapping[str, Tensor], *, has_default: bool
) -> dict[str, int]:
    """Return the position of the first matching rule for each parameter.

    The position of the default is the number of rules.

    Raises:
        CommHookError: a rule is the first match of no parameter and is not for a role, or no rule
            matches a parameter and there is no default.
    """
    matching = {
        name: [i for i, matcher in enumerate(matchers) if matcher.matches(name, parameter)]
        for name, parameter in parameters.items()
    }
    _check_all_used(matchers, matching)
    unmatched = [name for name, positions in matching.items() if not positions]
    if unmatched and not has_default:
        raise CommHookError(
            f"hook 'route': no rule matches {_listed(unmatched)}; add a rule, or a default"
        )
    return {
        name: positions[0] if positions else len(matchers) for name, positions in matching.items()
    }


def _check_all_used(matchers: Sequence[Matcher], matching: Mapping[str, list[int]]) -> None:
    used = {positions[0] for positions in matching.values() if positions}
    for i, matcher in enumerate(matchers):
        if i in used or matcher.may_be_unused:
            continue
        if names := [name for name, positions in matching.items() if i in positions]:
            raise CommHookError(
                f"hook 'route': earlier rules take all that rule {matcher.rule!r} matches, "
                f"{_listed(names)}; move it to the front, or remove it"
            )
        raise CommHookError(
            f"hook 'route': rule {matcher.rule!r} matches no parameter of the model, which has "
            f"{_listed(list(matching))}"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
