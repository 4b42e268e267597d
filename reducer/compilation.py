"""Make the wrapper work with torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from reducer.options import FIRST_BUCKET_BYTES

__all__: list[str] = []

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function, *, recursive: bool = False) -> Function:
    """Exclude the function itself from compilation, but not the functions that it calls."""
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("Function", disable(function, recursive=recursive))


def not_compiled(function: Function) -> Function:
    """Exclude the function and all that it calls from compilation."""
    return outside_graphs(function, recursive=True)


@dataclass(frozen=True)
class _Buckets:
    """The part of torch's wrapper that the compiler reads."""

    bucket_bytes_cap: int


@contextmanager
@outside_graphs
def split_graphs_at_buckets(bucket_bytes: int) -> Iterator[None]:
    """Let the compiler split graphs at the ends of buckets, as it does for torch's wrapper.

    The compiler accepts no buckets that are smaller than torch's first one.
    """
    before = TorchDDP._active_ddp_module  # noqa: SLF001
    buckets: Any = _Buckets(max(bucket_bytes, FIRST_BUCKET_BYTES))
    TorchDDP._active_ddp_module = buckets  # noqa: SLF001
    try:
        yield
    finally:
        TorchDDP._active_ddp_module = before  # noqa: SLF001
