"""Finds models sharded by ``fully_shard``. Torch's FSDP takes long to import, so do it late."""

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from commhooks.adapters.adapter import Adapter

__all__ = ["fsdp_adapter", "is_fully_sharded"]


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to the module itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def fsdp_adapter(model: nn.Module, replicas: dist.ProcessGroup | None = None) -> Adapter:
    """Return a new adapter of ``model``."""
    from commhooks.adapters.fsdp import FSDPAdapter

    return FSDPAdapter(model, replicas)
