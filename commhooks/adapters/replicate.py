"""The adapter of ``torch.distributed._composable.replicate``, as it was before FSDP2's.

It wraps a list of the module's parameters in torch's ``DistributedDataParallel``, in the first
forward. Private names of torch occur only here.
"""

from typing import Any

from torch import nn

from commhooks.adapters.torch_ddp import TorchDDPAdapter

__all__ = ["is_replicated", "replicate_adapter"]


def is_replicated(model: nn.Module) -> bool:
    """Return whether ``replicate`` was applied to the module itself."""
    module = "torch.distributed._composable.replicate"
    return any((c.__module__, c.__name__) == (module, "DDP") for c in type(model).mro())


def replicate_adapter(model: nn.Module) -> TorchDDPAdapter:
    """Return the adapter of the wrapper, which is created now if there was no forward yet."""
    from torch.distributed._composable.replicate import replicate  # imports FSDP2 as well

    state: Any = replicate.state(model)
    if not state.has_initialized:
        state.lazy_init()
    # In the list, parameters are named "0", "1", ...
    names = {str(index): name for index, name in enumerate(state._param_names)}  # noqa: SLF001
    return TorchDDPAdapter(state._ddp, model, names)  # noqa: SLF001
