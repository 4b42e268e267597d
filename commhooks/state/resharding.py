"""The state of a hook for other ranks than those that saved it.

Each rank reads its share of the old ranks, adds up what they contribute, and all ranks add up
their sums. So each field is the mean over the old replicas, and no rank reads the states of all.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook
from commhooks.precision import at_least_float32
from commhooks.state.entries import HookPart, parts_of, put
from commhooks.state.layout import DistributedModel, Layout, Source, layout_of, rows_of
from reducer.peers import collective

Key: TypeAlias = tuple[str, ...]
"""The path of a hook, a parameter or bucket, and a field."""


class Resharding:
    """Converts a state that ranks in the layout ``old`` have saved."""

    def __init__(self, hook: CommHook, model: DistributedModel, old: Layout) -> None:
        if len(model.shard_groups) > 1:
            raise CommHookStateError(
                f"expected the same shard group for all parameters, found "
                f"{len(model.shard_groups)}; only the same ranks can load the states of hooks on "
                "such models"
            )
        self._hook = hook
        self._model = model
        self._old, self._here = old, layout_of(model)
        self._keeps_shards = old.shards == self._here.shards
        self._sums: dict[Key, Tensor] = {}  # of this rank's share
        self._state: dict[Any, Any] = {}

    def add(self, parts: Mapping[Source, Mapping[Any, Any]]) -> None:
        """Add this rank's share. Raises CommHookStateError if it cannot be used on these ranks."""
        for source, state in parts.items():
            for part in parts_of(state, self._hook, self._model.parameters):
                for name, entry in part.entries.items():
                    self._check(part, name, entry)
                    if source.kind == "rank":
                        self._add(part, name, source, self._mean(part, name, entry))
                    elif self._keeps_shards:
                        put(self._state, (*part.path, name), dict(entry))
                    else:
                        whole = {it: self._old_shard(part, name, it, entry) for it in entry}
                        self._add(part, name, source, whole)

    def described(self) -> dict[Key, tuple[torch.Size, torch.dtype]]:
        """Return shape and dtype of the sums."""
        return {key: (value.shape, value.dtype) for key, value in self._sums.items()}

    def combine(self, sums: Mapping[Key, tuple[torch.Size, torch.dtype]]) -> dict[Any, Any]:
        """Return the state of this rank, from the sums that any rank has. Collective."""
        parts = {part.path: part for part in parts_of({}, self._hook, self._model.parameters)}
        for key in sorted(sums):
            shape, dtype = sums[key]
            zeros = torch.zeros(shape, dtype=dtype, device=self._model.device)
            total = self._sums.pop(key, zeros).contiguous()
            for group in [
                self._model.group,
                *([] if self._keeps_shards else self._model.shard_groups),
            ]:
                with collective(group, "the sum of a saved state"):
                    dist.all_reduce(total, group=group)
            *path, name, field = key
            part = parts[tuple(path)]
            declared = part.declared(name)[field]
            if declared.per_element:
                own = self._cut(total, name, part.gradients[name])
                total = own.reshape(declared.shape)  # type: ignore[arg-type]
            put(self._state, key, total.to(declared.dtype or total.dtype))
        return self._state

    def _check(self, part: HookPart, name: str, entry: Mapping[str, Tensor]) -> None:
        """Raise CommHookStateError if a field of an entry cannot be used."""
        state = f"the state of hook {part.hook.name!r}"
        ranks = f"{self._old} replicas x shards, and cannot be used on {self._here}"
        if part.is_spread:
            raise CommHookStateError(
                f"{state} was saved on {ranks}, because each rank has that of other parameters, or "
                "of parts of them. Begin without the state of the hook"
            )
        fields = part.fields(name)
        if problem := part.problem(name, entry):
            raise CommHookStateError(f"{state}, {name!r}: {problem}. It is damaged")
        if fields is None and name in part.gradients:
            raise CommHookStateError(
                f"{state} was saved on {ranks}, because the hook does not declare its fields: see "
                "state_fields in docs/writing-a-hook.md"
            )
        if fields is None:
            raise CommHookStateError(
                f"{state} has the parameter {name!r}, which the model does not have, or does not "
                "train"
            )
        known = [
            it.name
            for it in fields
            if self._keeps_shards or it.per_element or it.across_ranks == "own"
        ]
        for it in entry:
            if it not in known:
                raise CommHookStateError(
                    f"{state} was saved on {ranks}, because its field {it!r} of {name!r} belongs "
                    "to a shard. Use as many shards as before, or begin without the state of the "
                    "hook"
                )

    def _mean(self, part: HookPart, name: str, entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a rank contributes to the means."""
        declared = part.declared(name)
        own = {
            it: value.to(self._model.device)  # where the means are
            for it, value in entry.items()
            if declared[it].across_ranks == "own"
        }
        mean = {
            it: self._old_shard(part, name, it, entry) / self._old.replicas
            for it, field in declared.items()
            if field.across_ranks == "averageable" and (it in entry or own)
        }
        part.hook.keep_own(mean, own)
        return mean

    def _add(self, part: HookPart, name: str, source: Source, values: Mapping[str, Tensor]) -> None:
        for it, value in values.items():
            key = (*part.path, name, it)
            if self._keeps_shards:
                self._sums[key] = self._sums[key] + value if key in self._sums else value
                continue
            shape, dim = self._whole(name, part.gradients[name])
            rows = rows_of(shape[dim], source.number % self._old.shards, self._old.shards)
            total = self._sums.setdefault(key, value.new_zeros(shape))
            total.narrow(dim, rows.start, len(rows)).add_(value.narrow(dim, 0, len(rows)))

    def _old_shard(
        self, part: HookPart, name: str, field: str, entry: Mapping[str, Tensor]
    ) -> Tensor:
        """Return a field as one of the old ranks had it, in the form of its gradient."""
        declared, value = part.declared(name)[field], entry.get(field)
        if value is not None and not declared.per_element:
            return value.to(self._model.device, at_least_float32(value.dtype))
        gradient = part.gradients[name]
        # A sum of errors in bfloat16 would lose what is small.
        dtype = at_least_float32(declared.dtype or gradient.dtype if value is None else value.dtype)
        if self._keeps_shards:  # its positions in memory count, see CommHook.keep_own
            old = torch.zeros_like(gradient, dtype=dtype, device=self._model.device)
        else:
            shape, dim = self._whole(name, gradient)
            sizes = list(shape)
            sizes[dim] = -(-sizes[dim] // self._old.shards)
            old = torch.zeros(sizes, dtype=dtype, device=self._model.device)
        return old if value is None else old.copy_(value.reshape(old.shape))

    def _cut(self, whole: Tensor, name: str, gradient: Tensor) -> Tensor:
        """Return this rank's shard, with zeros at its end if others are longer."""
        if self._keeps_shards:
            return whole
        dim = self._whole(name, gradient)[1]
        rows = rows_of(whole.shape[dim], self._model.rank % self._here.shards, self._here.shards)
        own = whole.new_zeros(gradient.shape)
        own.narrow(dim, 0, len(rows)).copy_(whole.narrow(dim, rows.start, len(rows)))
        return own

    def _whole(self, name: str, gradient: Tensor) -> tuple[torch.Size, int]:
        """Return the shape of a parameter, and the dimension that it is cut in."""
        return self._model.whole(name) or (gradient.shape, 0)
