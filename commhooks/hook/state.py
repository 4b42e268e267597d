"""The declaration of a hook's state: its fields, from which a saved state is checked.

A hook keeps tensors in ``state[parameter][field]``. :meth:`CommHook.state_fields` returns the
fields of a parameter as :class:`StateField`, and ``bucket_fields`` those that are kept for a
whole bucket. An entry has all of its fields or does not exist, because a hook makes it in the
first step that needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

AcrossRanks = Literal["own", "averageable", "same"]
"""Contents of the same field on other ranks: unrelated numbers; numbers that can be replaced by
their mean over the ranks, as errors can; or the same numbers."""

EXTRA_STATE = ".extra_state"
"""The key of :attr:`CommHook.extra_state` in a saved state, whose values are JSON there."""
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class StateField:
    """A tensor that a hook keeps from step to step: ``state[key][name]``."""

    name: str
    across_ranks: AcrossRanks
    shape: tuple[int | None, ...]
    """None: any size, for one that depends on the buckets."""
    dtype: torch.dtype | None = None
    """None: float32, or float64 for gradients in float64."""
    per_element: bool = False
    """Whether it has one number per element of the gradient, in the order of the elements."""
    is_optional: bool = False
    """Whether an entry may lack the field."""
    is_finite: bool = True
    """Whether a number that is not finite shows that the state is damaged."""
    check: Callable[[Mapping[str, Tensor]], str | None] | None = None
    """Describes what is wrong with the numbers of an entry, as "expected ..., found ..."."""

    @classmethod
    def like(cls, gradient: Tensor, name: str, across_ranks: AcrossRanks) -> "StateField":
        """Return the field for one number per element of the gradient."""
        return cls(name, across_ranks, tuple(gradient.shape), per_element=True)

    def problem(self, value: Tensor | None) -> str | None:
        """Describe what is wrong with a saved value, None if the entry has none."""
        if value is None:
            return None if self.is_optional else f"expected {self._text()}, found none"
        if value.layout is not torch.strided:
            return f"expected a dense tensor, found one of layout {value.layout}"
        if not self._fits(value):
            return f"expected {self._text()}, found {_text(value.dtype, value.shape)}"
        if self.is_finite and value.is_floating_point() and not value.isfinite().all():
            return "expected finite numbers, found others"
        return None

    def _fits(self, value: Tensor) -> bool:
        fits_dtype = value.dtype in (_FLOATS if self.dtype is None else (self.dtype,))
        sizes = zip(self.shape, value.shape, strict=False)
        fits_shape = all(wanted in (None, found) for wanted, found in sizes)
        return fits_dtype and len(self.shape) == value.dim() and fits_shape

    def _text(self) -> str:
        return _text("float32 or float64" if self.dtype is None else self.dtype, self.shape)


def no_state(_: Any, gradient: Tensor) -> Sequence[StateField]:  # noqa: ARG001
    """Return no fields; the ``state_fields`` of a hook without state of its own."""
    return ()


def entry_problem(entry: Any, fields: Sequence[StateField] | None = None) -> str | None:
    """Describe what is wrong with an entry of a saved state.

    Unless the ``fields`` that it may have are given, it may have any tensors.
    """
    if not isinstance(entry, Mapping):
        return f"expected tensors by name, found {type(entry).__name__}"
    for name, value in entry.items():
        if not isinstance(value, Tensor) or value.is_meta:
            return f"field {name!r}: expected a tensor, found {_kind(value)}"
    if fields is None:
        return None
    if unknown := [name for name in entry if name not in {field.name for field in fields}]:
        known = ", ".join(repr(field.name) for field in fields) or "none"
        return f"field {unknown[0]!r}: expected only the fields {known}"
    for field in fields:
        if problem := field.problem(entry.get(field.name)):
            return f"field {field.name!r}: {problem}"
    for field in fields:
        if field.check is not None and (problem := field.check(entry)):
            return f"field {field.name!r}: {problem}"
    return None


def _kind(value: Any) -> str:
    return "one without numbers" if isinstance(value, Tensor) else type(value).__name__


def _text(dtype: torch.dtype | str, shape: Sequence[int | None]) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{str(dtype).removeprefix('torch.')} of shape ({sizes})"
