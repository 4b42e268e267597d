"""What the framework tells hooks about the model, beyond its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["embedding", "output"]
"""The role of a parameter in its model, see :func:`commhooks.hook.roles.roles_of`."""


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model beyond its parameters."""

    roles: Mapping[str, Role] | None = None
    """The roles of the parameters that have one; None if they are unknown."""
    units: Sequence[Sequence[str]] | None = None
    """The parameters of each bucket, if they never change: the units of a model that is sharded
    with FSDP2, in its order. None on other models."""
