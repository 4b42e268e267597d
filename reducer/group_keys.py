"""Decide which parameters may share a bucket, and over which ranks each bucket is averaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

__all__: list[str] = []

NamedParameters = Sequence[tuple[str, nn.Parameter]]

_DELAYED = "reducer: delayed"


@dataclass(frozen=True)
class NumberedKeys:
    """Keys in the form that the reducer expects: integers, in the order of first appearance.

    ``keys``: one per parameter. ``process_groups``: by key, for keys that have one of their own.
    ``late``: the key of the parameters that are averaged last, if there are any.
    """

    keys: list[int]
    process_groups: dict[int, dist.ProcessGroup]
    late: int | None


class GroupKeys:
    """Assign a key to each parameter; only parameters with the same key share a bucket.

    Args:
        key_of: maps (name, parameter) to a key; by default, all parameters have the same key.
        process_groups: by key, the ranks to average over instead of the model's.
        delayed: names of parameters that are averaged last, in buckets of their own.
    """

    def __init__(
        self,
        key_of: Callable[[str, nn.Parameter], Hashable] | None,
        process_groups: Mapping[Hashable, dist.ProcessGroup] | None,
        delayed: Collection[str],
    ) -> None:
        self._key_of = key_of
        self._delayed = delayed
        self.process_groups = dict(process_groups or {})

    @property
    def are_given(self) -> bool:
        """Whether the user separates some parameters from others."""
        return self._key_of is not None or bool(self._delayed)

    def process_group(self, name: str, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """Return the group that the parameter is averaged over, or None for the model's group."""
        return self.process_groups.get(self._key(name, parameter))

    def number(self, named_parameters: NamedParameters) -> NumberedKeys:
        """Return the keys as numbers, which are equal on all ranks if the parameters are.

        Raises ValueError if a process group has a key that no parameter has.
        """
        keys = [self._key(name, parameter) for name, parameter in named_parameters]
        if unknown := self.process_groups.keys() - set(keys):
            raise ValueError(
                "key_process_groups has keys that group_key gives to no parameter: "
                f"{sorted(unknown, key=str)}; it gives {sorted(set(keys), key=str)}."
            )
        numbers: dict[Hashable, int] = {}
        numbered = [numbers.setdefault(key, len(numbers)) for key in keys]
        groups = {numbers[key]: group for key, group in self.process_groups.items()}
        return NumberedKeys(numbered, groups, numbers.get(_DELAYED))

    def _key(self, name: str, parameter: nn.Parameter) -> Hashable:
        if name in self._delayed:
            return _DELAYED
        return None if self._key_of is None else self._key_of(name, parameter)
