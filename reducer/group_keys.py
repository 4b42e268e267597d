"""Which parameters may share a bucket, and the ranks that each bucket is averaged over."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

__all__: list[str] = []

NamedParameters = Sequence[tuple[str, nn.Parameter]]

_DELAYED = "reducer: delayed"


@dataclass(frozen=True)
class NumberedKeys:
    """As the reducer takes them: one key per parameter, in the order of their first appearance."""

    keys: list[int]
    process_groups: dict[int, dist.ProcessGroup]
    late: int | None
    """The key of the parameters that go last."""


class GroupKeys:
    """Gives each parameter its key; only parameters of one key share a bucket.

    Args:
        key_of: maps (name, parameter) to a key; default: one key for all.
        process_groups: of the keys whose parameters are averaged over other ranks.
        delayed: parameters that go last, in buckets of their own.
    """

    def __init__(
        self,
        key_of: Callable[[str, nn.Parameter], Hashable] | None,
        process_groups: Mapping[Hashable, dist.ProcessGroup] | None,
        delayed: NamedParameters | None,
    ) -> None:
        self._key_of = key_of
        self._delayed = frozenset(name for name, _ in delayed or ())
        self.process_groups = dict(process_groups or {})

    @property
    def are_given(self) -> bool:
        """Whether the user parts parameters in any way."""
        return self._key_of is not None or bool(self._delayed)

    def process_group(self, name: str, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """Of its own; None: the parameter is averaged over the model's ranks."""
        return self.process_groups.get(self._key(name, parameter))

    def number(self, named_parameters: NamedParameters) -> NumberedKeys:
        """The order of parameters is the same on all ranks, and so are the numbers.

        Raises ValueError where a process group has a key that no parameter has.
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
