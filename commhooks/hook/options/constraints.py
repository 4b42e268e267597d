"""What an option's type does not say: ``Annotated[int, Ge(1)]``, ``Annotated[str, Made(parse)]``.

Constraints of the package annotated_types, which have the same names and fields, do as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Ge", "Gt", "Le", "Lt", "Made", "MinLen", "MultipleOf"]


@dataclass(frozen=True)
class Ge:
    """At least ``ge``."""

    ge: float


@dataclass(frozen=True)
class Gt:
    """More than ``gt``."""

    gt: float


@dataclass(frozen=True)
class Le:
    """At most ``le``."""

    le: float


@dataclass(frozen=True)
class Lt:
    """Less than ``lt``."""

    lt: float


@dataclass(frozen=True)
class MultipleOf:
    """A multiple of ``multiple_of``."""

    multiple_of: int


@dataclass(frozen=True)
class MinLen:
    """Of ``min_length`` items or more."""

    min_length: int


@dataclass(frozen=True)
class Made:
    """Kept as ``make`` returns it, which raises ValueError for what it cannot take."""

    make: Callable[[Any], Any]
