"""Find the adapter of a wrapped model, also inside the wrappers of other libraries."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from commhooks.adapters.adapter import Adapter
from commhooks.adapters.ddp import DDPAdapter
from commhooks.adapters.torch_ddp import TorchDDPAdapter
from commhooks.errors import CommHookError
from reducer import DistributedDataParallel


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to the module itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # takes long to import
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def _maker_of(model: nn.Module) -> Callable[[Any], Adapter] | None:
    """Return what makes the adapter of this kind of model, if there is one."""
    if isinstance(model, DistributedDataParallel):
        return DDPAdapter
    if isinstance(model, TorchDistributedDataParallel):
        return TorchDDPAdapter
    if is_fully_sharded(model):
        from commhooks.adapters.fsdp.gradients import FSDPAdapter  # imports torch's FSDP

        return FSDPAdapter
    kinds = {(kind.__module__, kind.__name__) for kind in type(model).mro()}
    return _replicate_adapter if _REPLICATED in kinds else None


def _replicate_adapter(model: nn.Module) -> TorchDDPAdapter:
    """Return the adapter of torch's wrapper, which ``replicate`` makes in the first forward."""
    from torch.distributed._composable.replicate import replicate  # imports FSDP2 as well

    state: Any = replicate.state(model)
    if not state.has_initialized:
        state.lazy_init()
    return TorchDDPAdapter(state._ddp, model)  # noqa: SLF001


_REPLICATED = ("torch.distributed._composable.replicate", "DDP")
"""Module and name of the class that torch's ``replicate``, of the time before FSDP2, adds."""

_REFUSED: dict[str, str] = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "FSDP1 flattens parameters before it averages them, so hooks cannot tell them apart. Shard "
        "the model with torch.distributed.fsdp.fully_shard (FSDP2) over replicas and shards"
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine": (
        "DeepSpeed averages gradients itself and calls no hooks. Train the module without it, "
        "wrapped in commhooks.DistributedDataParallel"
    ),
    "torch.nn.parallel.data_parallel.DataParallel": (
        "DataParallel works in one process and averages nothing between ranks. Start one process "
        "per device with torchrun, and wrap the module in commhooks.DistributedDataParallel"
    ),
    "torchft.ddp.DistributedDataParallel": (
        "torchft's wrapper sends an all-reduce through its manager. Use "
        "commhooks.integrations.torchft.DistributedDataParallel in its place"
    ),
}
"""Why there is no adapter for some classes. By name: their packages need not be imported."""

# Of Fabric's _FabricModule, and of torch.compile's OptimizedModule. `accelerate` keeps the latter
# in the __dict__ of a copy whose blocks are compiled one by one.
_INNER = ("_forward_module", "_orig_mod")

_adapters: "weakref.WeakKeyDictionary[nn.Module, Adapter]" = weakref.WeakKeyDictionary()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside what torch.compile, Fabric and Accelerate put around it.

    Models are known by this module, so that all forms of one model have one handle.
    """
    if not isinstance(model, nn.Module):
        raise CommHookError(f"expected a wrapped model, found {type(model).__name__}")
    for name in _INNER:
        inner = vars(model)["_modules"].get(name, vars(model).get(name))
        if isinstance(inner, nn.Module):
            return unwrap(inner)
    return model


def inner_module(model: nn.Module) -> nn.Module:
    """Return the module inside the wrapper, or ``model`` if it is none."""
    model = unwrap(model)
    return unwrap(model.module) if isinstance(model, TorchDistributedDataParallel) else model


def adapter_of(model: nn.Module) -> Adapter:
    """Return the adapter of ``model``. There is one per model: torch takes a hook only once."""
    model = unwrap(model)
    if isinstance(inner_module(model), TorchDistributedDataParallel):
        raise CommHookError(
            f"found {type(model).__name__} around {type(inner_module(model)).__name__}: gradients "
            "would be averaged twice; wrap the module once, or pass it to the library unwrapped"
        )
    if model not in _adapters:
        make = _maker_of(model)
        if make is None or _refused(model):
            raise CommHookError(_refusal(model))
        _adapters[model] = make(model)
    return _adapters[model]


def _refused(module: nn.Module) -> str | None:
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).mro())
    return next((_REFUSED[name] for name in names if name in _REFUSED), None)


def _refusal(model: nn.Module) -> str:
    """Return why there is no adapter for ``model``, and what to do."""
    found = type(model).__name__
    for name, module in model.named_modules():
        where = f"{found} with {type(module).__name__} at {name!r}" if name else found
        if reason := _refused(module):
            return f"hooks cannot be registered on {where}: {reason}"
        if name and _maker_of(module):
            return f"expected the wrapped model itself, found {where}; register the hook on that"
    if not dist.is_initialized():
        return (
            "there is no process group: call torch.distributed.init_process_group(...) on every "
            "rank (torchrun sets what it reads), then wrap the model in "
            "commhooks.DistributedDataParallel"
        )
    return (
        "expected a model wrapped in commhooks.DistributedDataParallel, or torch's own, found "
        f"{found}; wrap it first. Accelerate and Fabric wrap it in prepare() and setup(): pass "
        "what these return. Lightning wraps it in fit(): pass trainer.strategy.model. An optimizer "
        "that averages gradients in step() leaves nothing to hook: see docs/integrations/others.md"
    )
