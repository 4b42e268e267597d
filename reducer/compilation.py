"""How the wrapper gets on with torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from reducer.arguments import FIRST_BUCKET_BYTES

__all__: list[str] = []

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function, *, recursive: bool = False) -> Function:
    """It does not compile the function, only what that calls."""
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("Function", disable(function, recursive=recursive))


def not_compiled(function: Function) -> Function:
    """Nor what it calls."""
    return outside_graphs(function, recursive=True)


@dataclass(frozen=True)
class _Buckets:
    """What it asks of a wrapper. It refuses buckets that are smaller than its first one."""

    bucket_bytes_cap: int


@contextmanager
@outside_graphs
def cut_at_buckets(bucket_bytes: int) -> Iterator[None]:
    """Within, it cuts graphs where buckets of this size end, as it does for torch's wrapper."""
    before = TorchDDP._active_ddp_module  # noqa: SLF001
    buckets: Any = _Buckets(max(bucket_bytes, FIRST_BUCKET_BYTES))
    TorchDDP._active_ddp_module = buckets  # noqa: SLF001
    try:
        yield
    finally:
        TorchDDP._active_ddp_module = before  # noqa: SLF001
