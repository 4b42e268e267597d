"""Limits of options beyond their type: ``Annotated[int, Ge(1)]``, ``Annotated[str, Made(parse)]``.

The classes of the package annotated_types, which have the same names and fields, work as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Ge", "Gt", "Le", "Lt", "Made", "MinLen", "MultipleOf"]


@dataclass(frozen=True)
class Ge:
    """Require a value of at least ``ge``."""

    ge: float


@dataclass(frozen=True)
class Gt:
    """Require a value greater than ``gt``."""

    gt: float


@dataclass(frozen=True)
class Le:
    """Require a value of at most ``le``."""

    le: float


@dataclass(frozen=True)
class Lt:
    """Require a value less than ``lt``."""

    lt: float


@dataclass(frozen=True)
class MultipleOf:
    """Require a multiple of ``multiple_of``."""

    multiple_of: int


@dataclass(frozen=True)
class MinLen:
    """Require at least ``min_length`` items."""

    min_length: int


@dataclass(frozen=True)
class Made:
    """Convert the value with ``make``, which raises ValueError if it cannot."""

    make: Callable[[Any], Any]
