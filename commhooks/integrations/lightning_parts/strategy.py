"""A strategy that wraps models in our wrapper, and registers a hook."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from commhooks.adapters.handle import AnyHook, HookHandle, register
from commhooks.errors import CommHookError
from reducer import DistributedDataParallel

__all__ = ["WrapperStrategy"]

_TORCH_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class WrapperStrategy:
    """Wraps models in our wrapper. To be inherited before a DDPStrategy."""

    strategy_name = "commhooks"

    def __init__(self, hook: AnyHook | None = None, **options: Any) -> None:
        strategy = super().__init__
        known = _parameters(strategy) | _parameters(DistributedDataParallel.__init__)
        self._hook = hook
        self._hook_options = {name: it for name, it in options.items() if name not in known}
        others = {name: it for name, it in options.items() if name in known}
        if hook is None and self._hook_options:
            raise CommHookError(
                f"{type(self).__name__}: found the options {sorted(self._hook_options)} without a "
                "hook; name it: hook='int8'"
            )
        if given := [name for name in _TORCH_HOOKS if name in options]:
            raise CommHookError(
                f"{type(self).__name__}: found {given[0]}, which is for torch's wrapper; pass the "
                "hook as `hook`, its name or a function fn(state, bucket), and what that needs as "
                "`state`"
            )
        # Buckets that are rebuilt after the first step would differ in a resumed run.
        strategy(**({"stable_buckets": True} | others))
        self.handle: HookHandle | None = None

    def _wrap(self, module: nn.Module, device: torch.device, options: Any) -> Any:
        device_ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=device_ids, **options)

    def _register(self, model: nn.Module) -> None:
        if self._hook is not None:
            self.handle = register(model, self._hook, **self._hook_options)


def _parameters(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    named = {it.name for it in parameters if it.kind is not inspect.Parameter.VAR_KEYWORD}
    return named - {"self", "module", "hook", "hook_options"}
