"""Checks of the entries of a saved state against the fields that hooks declare."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from commhooks.algorithms.bucket_parameters import gradient_of
from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook
from commhooks.hook.state import StateField, entry_problem

__all__ = ["HookPart", "states_of_hooks"]


@dataclass(frozen=True)
class HookPart:
    """The part of a saved state that belongs to one hook, which may be nested in others."""

    path: str
    """"" for the outermost hook, ".inner" for one nested in it."""
    hook: CommHook
    gradients: Mapping[str, Tensor]
    """The gradients that the hook gets on this rank, by parameter, without numbers."""
    entries: Mapping[Any, Any]
    is_spread: bool = False
    """Whether the hook gets other parameters, or parts of them, on other ranks."""

    def check(self) -> None:
        """Raise CommHookStateError unless the entries have the declared fields."""
        for key, entry in self.entries.items():
            if problem := entry_problem(entry) or self._misfit(key, entry):
                raise CommHookStateError(
                    f"state of hook {self.hook.name!r}{self.path and f' at {self.path!r}'}, "
                    f"{key!r}: {problem}. It is damaged, or of another model: load the state that "
                    "this rank saved, or begin without one on all ranks: load_state_dict(saved | "
                    "{'state': {}})"
                )

    def same_fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return key, name and shape of each tensor that all ranks must have."""
        return sorted(
            (key, field.name, tuple(entry[field.name].shape))
            for key, entry in self.entries.items()
            for field in self._declared(key) or ()
            if field.across_ranks == "same" and field.name in entry
        )

    def field(self, key: Any, name: str) -> StateField | None:
        """Return the declaration of a field, None if the hook has not declared it."""
        return next((it for it in self._declared(key) or () if it.name == name), None)

    def _misfit(self, key: Any, entry: Mapping[str, Tensor]) -> str | None:
        fields = self._declared(key)
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

    def _declared(self, key: Any) -> Sequence[StateField] | None:
        if key in self.gradients:
            return self.hook.state_fields(self.gradients[key])
        is_bucket = isinstance(key, str) and re.fullmatch("[0-9a-f]{16}", key)
        return self.hook.bucket_fields() or None if is_bucket else None


def states_of_hooks(
    state: Mapping[str, Any], hook: CommHook, parameters: Mapping[str, Tensor]
) -> Iterator[HookPart]:
    """Yield the parts of a saved state. ``parameters``: those that ``hook`` was prepared for."""
    gradients = {name: gradient_of(parameter) for name, parameter in parameters.items()}
    return _walk(state, hook, gradients, "", is_spread=False)


def _walk(
    state: Mapping[str, Any],
    hook: CommHook,
    gradients: Mapping[str, Tensor],
    path: str,
    *,
    is_spread: bool,
) -> Iterator[HookPart]:
    nested = {f".{path}": each for path, each in hook.nested().items()}
    inner = {key: state[key] for key in nested if isinstance(state.get(key), Mapping)}
    own = {key: entry for key, entry in state.items() if key not in inner}
    yield HookPart(path, hook, gradients, own, is_spread)
    of_nested = hook.nested_parameters(gradients)
    is_spread = is_spread or hook.spreads_parameters
    for key, each in nested.items():
        parameters = of_nested.get(key[1:], {})
        yield from _walk(inner.get(key, {}), each, parameters, path + key, is_spread=is_spread)
