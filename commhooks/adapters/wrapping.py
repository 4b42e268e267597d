"""The wrapper that this package uses for its own models."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from commhooks.extensions import ENGINE
from reducer import DistributedDataParallel

__all__ = ["wrap"]


def wrap(module: nn.Module, **options: Any) -> nn.Module:
    """Wrap the module in our wrapper, or in torch's if ours is not compiled."""
    if ENGINE.is_compiled:
        return DistributedDataParallel(module, **options)
    if options.pop("stable_buckets", False):
        options["find_unused_parameters"] = True  # with it, torch keeps the first buckets
    return TorchDistributedDataParallel(module, **options)
