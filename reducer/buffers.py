"""Keeps the buffers of a module, such as running means, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel.distributed import _BufferCommHookLocation

__all__: list[str] = []

BROADCAST_BYTES = 250 * 2**20
"""Tensors are broadcast together up to this size."""


@dataclass(frozen=True)
class BufferHook:
    """A user's replacement for the broadcast: ``function(state, buffers by name)``."""

    function: Callable[..., Any]
    state: object
    location: _BufferCommHookLocation


def broadcast(group: dist.ProcessGroup, tensors: Iterable[Tensor], root: int) -> None:
    """Overwrites tensors with those of the group's rank ``root``."""
    tensors = [tensor.detach() for tensor in tensors]
    if tensors and group.size() > 1:
        _broadcast_coalesced(group, tensors, BROADCAST_BYTES, root)


def sync_buffers(
    group: dist.ProcessGroup, buffers: dict[str, Tensor], hook: BufferHook | None, root: int
) -> list[torch.futures.Future[Any]]:
    """Makes buffers the same on all ranks, by ``hook`` if there is one.

    Returns the futures that must have completed by the end of backward. Autograd is not told that
    buffers change: a graph that was recorded with the old values stays valid.
    """
    with (
        torch.no_grad(),
        _unsafe_preserve_version_counter(tuple(buffers.values())),
    ):
        if hook is None:
            broadcast(group, buffers.values(), root)
            return []
        return list(hook.function(hook.state, buffers) or [])


def refuse_sync_batch_norm(module: nn.Module, device: torch.device) -> None:
    """SyncBatchNorm has no kernels for the CPU."""
    if device.type == "cpu" and any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")
