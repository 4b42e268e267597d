"""The state of a hook as tensors that all ranks have together, which other ranks can read."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from commhooks.adapters.adapter import Adapter
from commhooks.adapters.layout import Layout
from commhooks.adapters.state_entries import HookPart, states_of_hooks
from commhooks.adapters.state_key import Key
from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook

__all__ = ["SpreadState"]

_KINDS = {"averageable": "mean", "same": "same", "own": "own"}
Entry = dict[str, Tensor]


class SpreadState:
    """Converts the state of a hook to a flat dict of such tensors, by the text of their keys.

    All ranks construct it.
    """

    def __init__(self, hook: CommHook, adapter: Adapter) -> None:
        self._hook = hook
        self._adapter = adapter
        self._layout = Layout(adapter)
        self._parts = {part.path: part for part in states_of_hooks({}, hook, adapter.parameters)}

    def save(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what ``hook.state_dict()`` returned on this rank, as its part of the whole."""
        saved = {}
        for part in states_of_hooks(state, self._hook, self._adapter.parameters):
            for name, entry in part.entries.items():
                for field, value in entry.items():
                    key = self._key(part, name, field)
                    saved[str(key)] = self._spread(key, value)
        return saved

    def targets(self, stored: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        """Return empty tensors for what this rank has to read of a checkpoint."""
        targets = {}
        for key in self._usable(stored):
            it = stored[str(key)]
            target = self._target(key, it.size, it.properties.dtype)
            if target is not None:
                targets[str(key)] = target
        return targets

    def load(self, read: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the state to load from what was read into :meth:`targets`. Collective."""
        fields: dict[tuple[str, str], list[tuple[Key, Tensor]]] = defaultdict(list)
        for key in self._usable(read):
            fields[key.path, key.name].append((key, read[str(key)]))
        entries: dict[str, dict[str, Entry]] = defaultdict(dict)
        for (path, name), values in fields.items():
            entries[path][name] = self._entry(self._parts[path], name, values)
        return _nested(self._hook, entries, "")

    def _key(self, part: HookPart, name: str, field: str) -> Key:
        declared = part.field(name, field)
        is_own = declared is None or part.is_spread
        kind = "own" if is_own else _KINDS[declared.across_ranks]  # type: ignore[union-attr]
        number = self._layout.shard
        if kind == "own":
            number = self._adapter.rank
        elif declared is not None and declared.per_element:
            number = -1
        return Key(self._layout.text, kind, number, part.path, name, field)

    def _spread(self, key: Key, value: Tensor) -> Tensor:
        if key.number < 0:
            own = value.reshape(self._gradient(key).shape)
            return (
                self._layout.of_replicas(own, key.name)
                if key.kind == "mean"
                else self._layout.of_one(own, key.name)
            )
        return self._layout.of_column(value) if key.kind == "mean" else value

    def _usable(self, texts: Iterable[str]) -> Iterator[Key]:
        """Yield the keys in the same order on all ranks."""
        for key in map(Key.of, sorted(texts)):
            if key.path in self._parts:  # otherwise the handle will say that it is another hook
                self._check(key)
                yield key

    def _check(self, key: Key) -> None:
        """Raise CommHookStateError if a field cannot be used on these ranks."""
        part = self._parts[key.path]
        if key.number < 0 and key.name not in part.gradients:
            raise CommHookStateError(
                f"the checkpoint has a state of hook {part.hook.name!r} for the parameter "
                f"{key.name!r}, which the model does not have, or does not train"
            )
        if key.layout == self._layout.text:
            return
        ranks = f"{key.layout} replicas x shards, and cannot be used on {self._layout.text}"
        if part.is_spread:
            raise CommHookStateError(
                f"the state of hook {part.hook.name!r} was saved on {ranks}, because each rank has "
                "that of other parameters, or of parts of them. Begin without the state of the hook"
            )
        if key.kind == "own" and part.field(key.name, key.field) is None:
            raise CommHookStateError(
                f"the state of hook {part.hook.name!r} was saved on {ranks}, because the hook does "
                "not declare its fields: see state_fields in docs/writing-a-hook.md"
            )
        if key.kind != "own" and key.number >= 0 and key.shards != self._layout.shards:
            raise CommHookStateError(
                f"the state of hook {part.hook.name!r} was saved on {ranks}, because its field "
                f"{key.field!r} belongs to a shard. Use as many shards as before, or begin without "
                "the state of the hook"
            )

    def _target(self, key: Key, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        is_same_layout = key.layout == self._layout.text
        if key.number < 0:
            dim = self._layout.whole(key.name, self._gradient(key))[1]
            if key.kind == "same":
                return self._layout.target_of_one(size, dtype, dim)
            if is_same_layout:
                return self._layout.target_of_replicas(size, dtype, dim)
            return self._layout.target_of_mean(size, dtype)
        own_number = self._adapter.rank if key.kind == "own" else self._layout.shard
        if key.number != own_number and (is_same_layout or key.kind != "own"):
            return None
        if key.kind == "mean" and is_same_layout:
            return self._layout.target_of_column(size, dtype)
        return torch.empty(size, dtype=dtype, device=self._adapter.device)

    def _entry(self, part: HookPart, name: str, values: list[tuple[Key, Tensor]]) -> Entry:
        """Return the fields of one parameter on this rank."""
        own: dict[Key, Entry] = defaultdict(dict)  # by the rank that saved them
        means, entry = {}, {}
        for key, value in values:
            if key.layout == self._layout.text:
                entry[key.field] = self._own(key, value)
            elif key.kind == "own":
                own[key._replace(field="")][key.field] = value
            elif key.kind == "mean" and key.number < 0:
                means[key.field] = self._layout.mean(value)
            else:
                entry[key.field] = value.mean(0) if key.kind == "mean" else self._own(key, value)
        for key, fields in own.items():
            self._keep_own(part, key, fields, means)
        for field, mean in means.items():
            dim = self._layout.whole(name, part.gradients[name])[1]
            shard = self._layout.own_part(mean, part.gradients[name], dim)
            entry[field] = self._in_own_form(part, name, field, shard)
        return entry

    def _own(self, key: Key, read: Tensor) -> Tensor:
        """Return this rank's numbers, of what it has read as it is."""
        local = read.to_local() if isinstance(read, DTensor) else read
        value = local[0] if key.kind == "mean" else local
        if key.number >= 0:
            return value
        gradient = self._gradient(key)
        value = self._layout.pad(value, gradient, self._layout.whole(key.name, gradient)[1])
        return self._in_own_form(self._parts[key.path], key.name, key.field, value)

    def _keep_own(self, part: HookPart, key: Key, own: Entry, means: Entry) -> None:
        """Add what the own fields of a rank contribute to the means."""
        if not means:
            return
        gradient = part.gradients[key.name]
        shape, dim = self._layout.whole(key.name, gradient)
        if key.shards == self._layout.shards == 1:  # positions are those in the parameter's memory
            old = {
                field: torch.zeros_like(gradient, dtype=m.dtype, device=m.device)
                for field, m in means.items()
            }
        else:
            sizes = list(shape)
            sizes[dim] = -(-sizes[dim] // key.shards)
            old = {field: m.new_zeros(sizes) for field, m in means.items()}
        part.hook.keep_own(old, own)
        for field, mean in means.items():
            if mean.dim() == 0:
                mean += old[field]
                continue
            start = min(key.number % key.shards * old[field].shape[dim], shape[dim])
            length = min(old[field].shape[dim], shape[dim] - start)
            mean.narrow(dim, start, length).add_(old[field].narrow(dim, 0, length))

    def _in_own_form(self, part: HookPart, name: str, field: str, value: Tensor) -> Tensor:
        """Return the numbers in the shape that the hook keeps them in."""
        declared = part.field(name, field)
        return value if declared is None else value.reshape(declared.shape)  # type: ignore[arg-type]

    def _gradient(self, key: Key) -> Tensor:
        return self._parts[key.path].gradients[key.name]


def _nested(hook: CommHook, entries: Mapping[str, dict[str, Entry]], path: str) -> dict[str, Any]:
    """Return the state in the form of ``hook.state_dict()``."""
    nested = {
        f".{name}": _nested(each, entries, f"{path}.{name}") for name, each in hook.nested().items()
    }
    return {**entries.get(path, {}), **{name: state for name, state in nested.items() if state}}
