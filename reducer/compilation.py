"""How the wrapper gets on with torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

__all__: list[str] = []

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function, *, recursive: bool = False) -> Function:
    """It does not compile the function, only what that calls."""
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("Function", disable(function, recursive=recursive))


def not_compiled(function: Function) -> Function:
    """Nor what it calls."""
    return outside_graphs(function, recursive=True)


@contextmanager
@outside_graphs
def cut_at_buckets(wrapper: nn.Module) -> Iterator[None]:
    """Within, it cuts graphs where buckets of ``wrapper`` end, as it does for torch's wrapper."""
    before = TorchDDP._active_ddp_module  # noqa: SLF001
    TorchDDP._active_ddp_module = wrapper  # type: ignore[assignment]  # noqa: SLF001
    try:
        yield
    finally:
        TorchDDP._active_ddp_module = before  # noqa: SLF001
