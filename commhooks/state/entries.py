"""The entries of a state, and their checks against the fields that hooks declare."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from commhooks.algorithms.bucket_parameters import gradient_of
from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook
from commhooks.hook.options import instances_in
from commhooks.hook.state import EXTRA_STATE, StateField, entry_problem


@dataclass(frozen=True)
class HookPart:
    """The part of a state that belongs to one hook, which may be nested in others."""

    path: tuple[str, ...]
    """The keys of the state that lead to it: ``()`` for the outermost hook, ``(".inner",)``."""
    hook: CommHook
    gradients: Mapping[str, Tensor]
    """The gradients that the hook gets on this rank, by parameter, without numbers."""
    entries: Mapping[Any, Any]
    is_spread: bool
    """Whether the hook gets other parameters, or parts of them, on other ranks."""

    def check(self) -> None:
        """Raise CommHookStateError unless the entries have the declared fields."""
        for key, entry in self.entries.items():
            if problem := self.problem(key, entry) or self._misfit(key, entry):
                at = f" at {''.join(self.path)!r}" if self.path else ""
                raise CommHookStateError(
                    f"state of hook {self.hook.name!r}{at}, {key!r}: {problem}. It is damaged, or "
                    "of another model: load the state that this rank saved, or begin without one "
                    "on all ranks: load_state_dict(saved | {'state': {}})"
                )

    def problem(self, key: Any, entry: Any) -> str | None:
        """Describe what is wrong with the form of an entry."""
        if key != EXTRA_STATE:
            return entry_problem(entry)
        is_json = isinstance(entry, Mapping) and all(isinstance(it, str) for it in entry.values())
        return None if is_json else f"expected JSON by name, found {entry!r:.60}"

    def is_same(self, key: Any, name: str) -> bool:
        """Return whether all replicas have the same numbers in a field."""
        declared = None if self.is_spread else self.declared(key).get(name)
        return declared is not None and declared.across_ranks == "same"

    def same_fields(self) -> list[tuple[str, str, str]]:
        """Return key, name, and shape or JSON, of each value that all replicas must have."""
        return sorted(
            (key, name, value if isinstance(value, str) else f"shape {tuple(value.shape)}")
            for key, entry in self.entries.items()
            for name, value in entry.items()
            if self.is_same(key, name)
        )

    def declared(self, key: Any) -> dict[str, StateField]:
        """Return the declared fields by name."""
        return {field.name: field for field in self.fields(key) or ()}

    def _misfit(self, key: Any, entry: Mapping[str, Tensor]) -> str | None:
        if key == EXTRA_STATE:
            return None
        fields = self.fields(key)
        if fields is not None:
            return entry_problem(entry, fields)
        if key not in self.gradients:
            what = "nested hook" if str(key).startswith(".") else "parameter"
            return f"there is no such {what}"
        present = {**entry, **self.hook.state.get(key, {})}
        return entry_problem(
            entry,
            [
                StateField(n, "own", tuple(t.shape), t.dtype, is_optional=True, is_finite=False)
                for n, t in present.items()
            ],
        )

    def fields(self, key: Any) -> Sequence[StateField] | None:
        """Return the declared fields of a parameter or bucket; None: the hook declares none."""
        if key in self.gradients:
            return self.hook.state_fields(self.gradients[key])
        if key == EXTRA_STATE:
            return [StateField(name, "same", ()) for name in self.entries.get(key, ())]
        is_bucket = isinstance(key, str) and re.fullmatch("[0-9a-f]{16}", key)
        return (self.hook.bucket_fields() or None) if is_bucket else None


def parts_of(
    state: Mapping[Any, Any], hook: CommHook, parameters: Mapping[str, Tensor]
) -> Iterator[HookPart]:
    """Yield the parts of a state. ``parameters``: those that ``hook`` was prepared for."""
    gradients = {name: gradient_of(parameter) for name, parameter in parameters.items()}
    return _walk(state, hook, gradients, (), is_spread=False)


def _walk(
    state: Mapping[Any, Any],
    hook: CommHook,
    gradients: Mapping[str, Tensor],
    path: tuple[str, ...],
    *,
    is_spread: bool,
) -> Iterator[HookPart]:
    nested = {f".{name}": each for name, each in hook.nested().items()}
    inner = {key: state[key] for key in nested if isinstance(state.get(key), Mapping)}
    own = {key: entry for key, entry in state.items() if key not in inner}
    yield HookPart(path, hook, gradients, own, is_spread)
    of_nested = hook.nested_parameters(gradients)
    is_spread = is_spread or hook.spreads_parameters
    for key, each in nested.items():
        parameters = of_nested.get(key[1:], {})
        yield from _walk(inner.get(key, {}), each, parameters, (*path, key), is_spread=is_spread)


def put(state: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Store a value under a path of keys."""
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def merge(one: Any, other: Any) -> Any:
    """Return the entries of two states. If both have a value, that of ``one`` counts."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one
    common = {key: merge(one[key], other[key]) for key in one if key in other}
    return {**other, **one, **common}


def on_cpu(state: Any) -> Any:
    """Return a state whose tensors are in host memory."""
    if isinstance(state, Mapping):
        return {key: on_cpu(value) for key, value in state.items()}
    return state.cpu() if isinstance(state, Tensor) else state


def count(state: Any) -> int:
    """Return the number of tensors and of extra values."""
    return sum(1 for kind in (Tensor, str) for _ in instances_in(state, kind))
