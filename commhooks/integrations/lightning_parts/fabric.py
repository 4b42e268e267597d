"""Fabric's strategy: what its ``DDPStrategy`` does for torch's wrapper only."""

from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from commhooks.adapters.handle import AnyHook, HookHandle, handle_of
from commhooks.hook.base import CommHook
from commhooks.integrations.lightning_parts.strategy import WrapperStrategy
from commhooks.state.files import KEY, GatheredState, load_state_of
from reducer import DistributedDataParallel

__all__ = ["FabricStrategy"]


class FabricStrategy(WrapperStrategy):
    """The methods of ``FabricCommHooksStrategy``."""

    root_device: torch.device
    _ddp_kwargs: dict[str, Any]
    _backward_sync_control: Any

    def __init__(self, hook: AnyHook | None = None, **options: Any) -> None:
        super().__init__(hook, **options)
        self._backward_sync_control = _BackwardSyncControl()

    def setup_module(self, module: nn.Module) -> Any:
        model = self._wrap(module, self.root_device, self._ddp_kwargs)
        self._register(model)
        return model

    def get_module_state_dict(self, module: nn.Module) -> Any:
        return super().get_module_state_dict(_unwrapped(module))  # type: ignore[misc]

    def load_module_state_dict(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().load_module_state_dict(  # type: ignore[misc]
            _unwrapped(module), *args, **kwargs
        )

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        state = state | {key: GatheredState(it) for key, it in _handles(state).items()}
        super().save_checkpoint(path, state, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        handles = _handles(state) if isinstance(state, MutableMapping) else {}
        rest = super().load_checkpoint(path, state, *args, **kwargs)  # type: ignore[misc]
        for key, handle in handles.items():
            if key not in state:  # otherwise Fabric has loaded it
                load_state_of(handle, rest, key)
                rest.pop(key, None)
        return rest


class _BackwardSyncControl:
    """What ``fabric.no_backward_sync()`` calls."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        assert isinstance(module, DistributedDataParallel), module
        return module.no_sync()


def _handles(state: Mapping[str, Any]) -> dict[str, HookHandle]:
    """Return the handles in ``state``, and those of its models if training can resume from it.

    Most programs list models and optimizers, and know nothing of hooks.
    """
    handles = {key: it for key, it in state.items() if isinstance(it, HookHandle)}
    if any(isinstance(it, torch.optim.Optimizer) for it in state.values()):
        for key, it in state.items():
            handle = handle_of(it) if isinstance(it, DistributedDataParallel) else None
            if (
                handle is not None
                and isinstance(handle.hook, CommHook)  # torch-style functions keep their own state
                and handle not in handles.values()
            ):
                handles[f"{KEY}.{key}"] = handle
    return handles


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module
