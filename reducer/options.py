"""The options of DistributedDataParallel, and the keys that keep parameters in separate buckets."""

from __future__ import annotations  # native.ReducerOptions is missing without extensions

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch.distributed as dist
from torch import nn

from reducer import native
from reducer.errors import expect

NamedParameters = Sequence[tuple[str, nn.Parameter]]

MIB = 2**20
DEFAULT_BUCKET_MB = 25.0
FIRST_BUCKET_BYTES = MIB
_DELAYED = "reducer: delayed"


class GroupKeys:
    """Assign a key to each parameter; only parameters with the same key share a bucket.

    Args:
        key_of: maps (name, parameter) to a key; by default, all parameters have the same key.
        process_groups: by key, the ranks to average over instead of the model's.
        delayed: names of parameters that are averaged last, in buckets of their own.
        sharded: names of parameters sharded by tensor parallelism. In a bucket with them, the
            others, of which all its ranks must compute the same average, would get the errors of
            different numbers.
    """

    def __init__(
        self,
        key_of: Callable[[str, nn.Parameter], Hashable] | None,
        process_groups: Mapping[Hashable, dist.ProcessGroup] | None,
        delayed: Collection[str],
        sharded: Collection[str] = (),
    ) -> None:
        expect(Callable | None, group_key=key_of)
        expect(Mapping | None, key_process_groups=process_groups)
        for key, group in (process_groups or {}).items():
            expect(dist.ProcessGroup, **{f"key_process_groups[{key!r}]": group})
        self._key_of = key_of
        self._delayed = delayed
        self.sharded = sharded
        self.process_groups = dict(process_groups or {})

    @property
    def are_given(self) -> bool:
        """Whether some parameters are separated from others."""
        return self._key_of is not None or bool(self._delayed) or bool(self.sharded)

    def process_group(self, name: str, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """Return the group that the parameter is averaged over, or None for the model's group."""
        return self.process_groups.get(self._key(name, parameter))

    def number(self, named_parameters: NamedParameters, settings: native.ReducerOptions) -> None:
        """Set the keys of ``settings``: numbers, in the order of first appearance.

        They are equal on all ranks if the parameters that require a gradient are. Raises ValueError
        if a process group has a key that no parameter has, frozen ones included.
        """
        keys = {name: self._key(name, parameter) for name, parameter in named_parameters}
        if unknown := self.process_groups.keys() - set(keys.values()):
            raise ValueError(
                "key_process_groups has keys that group_key gives to no parameter: "
                f"{sorted(unknown, key=str)}; it gives {sorted(set(keys.values()), key=str)}."
            )
        numbers: dict[tuple[Hashable, bool], int] = {}
        settings.keys = [
            numbers.setdefault(
                (keys[name], name in self.sharded and keys[name] != _DELAYED), len(numbers)
            )
            for name, parameter in named_parameters
            if parameter.requires_grad
        ]
        settings.key_groups = {
            number: self.process_groups[key]
            for (key, _), number in numbers.items()
            if key in self.process_groups
        }
        settings.late_key = numbers.get((_DELAYED, False))

    def _key(self, name: str, parameter: nn.Parameter) -> Hashable:
        key = None if self._key_of is None else self._key_of(name, parameter)
        if name not in self._delayed:
            return key
        if key in self.process_groups:
            raise ValueError(
                f'"{name}" has a process group of its own, that of the key {key!r}, but delayed '
                "parameters are averaged over all ranks: leave it out of "
                "delay_all_reduce_named_params, or its key out of key_process_groups"
            )
        return _DELAYED


@dataclass(frozen=True, kw_only=True)
class WrapperOptions:
    """Constructor arguments of DistributedDataParallel, checked and resolved.

    The fields are named after the arguments, which the class docstring of
    :class:`reducer.DistributedDataParallel` describes. An instance is never modified: a method that
    changes an option replaces the instance by means of :func:`dataclasses.replace`.

    ``device_ids``, ``output_device``: indices of GPUs, or None if inputs are not moved.
    ``bucket_bytes``: sizes of the first bucket, the second, and so on; the last size applies to all
    further buckets. ``bucket_bytes_cap_list``: the same if the user gave a list, otherwise empty.
    """

    dim: int
    device_ids: list[int] | None
    output_device: int | None
    forward_sync_buffers: bool
    bucket_bytes: tuple[int, ...]
    bucket_bytes_cap_list: list[int]
    group_keys: GroupKeys
    mixed_precision: Any
    find_unused_parameters: bool
    skip_all_reduce_unused_params: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    stable_buckets: bool
    batched_grad_copy: bool
    lazy_bucket_allocation: bool
    host_memory: bool

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type == "bool" and isinstance(text := getattr(self, each.name), str):
                raise TypeError(f"{each.name}: expected True or False, found {text!r}.")

    @property
    def bucket_bytes_cap(self) -> int:
        """The size of the largest buckets."""
        return max(self.bucket_bytes)


def bucket_sizes(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> tuple[int, ...]:
    """Return the field ``bucket_bytes`` of :class:`WrapperOptions`.

    By default the first bucket is small, so that communication starts early. Without any room,
    each parameter has a bucket, as in torch. Raises ValueError if a size is negative or not
    finite.
    """
    expect(Real | None, bucket_cap_mb=bucket_cap_mb)
    expect(Iterable | None, bucket_cap_mb_list=bucket_cap_mb_list)
    if bucket_cap_mb_list:
        megabytes = list(bucket_cap_mb_list)
    else:
        megabytes = [DEFAULT_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb]
    for size in megabytes:
        expect(Real, bucket_cap_mb_list=size)
    if not all(0 <= size < math.inf for size in megabytes):
        raise ValueError(f"Bucket sizes must be finite and not negative, found {megabytes} MiB.")
    sizes = [max(1, int(size * MIB)) for size in megabytes]
    if not bucket_cap_mb_list:
        sizes.insert(0, min(FIRST_BUCKET_BYTES, sizes[0]))
    return tuple(sizes)


def delayed_names(
    delay_all_reduce_named_params: NamedParameters | None, param_to_hook_all_reduce: object
) -> Collection[str]:
    """Return the names of the parameters to average last.

    Raises ValueError if only one of torch's two arguments is given.
    """
    if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
            "same time."
        )
    return frozenset(name for name, _ in delay_all_reduce_named_params or ())
