"""The options of DistributedDataParallel that its methods need after construction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from reducer.group_keys import GroupKeys, NamedParameters

__all__: list[str] = []

MIB = 2**20
DEFAULT_BUCKET_MB = 25.0
FIRST_BUCKET_BYTES = MIB


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

    @property
    def bucket_bytes_cap(self) -> int:
        """The size of the largest buckets."""
        return max(self.bucket_bytes)


def bucket_sizes(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> tuple[int, ...]:
    """Return the field ``bucket_bytes`` of :class:`WrapperOptions`.

    By default the first bucket is small, so that communication starts early. Raises ValueError if
    a size is not positive.
    """
    if bucket_cap_mb_list:
        megabytes = list(bucket_cap_mb_list)
    else:
        megabytes = [DEFAULT_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb]
    if any(size <= 0 for size in megabytes):
        raise ValueError(f"Bucket sizes must be positive, found {megabytes} MiB.")
    sizes = [int(size * MIB) for size in megabytes]
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
