"""Common parts of the integrations with ``lightning`` and with ``pytorch_lightning``.

Both packages have the same classes under different names, and neither accepts the other's. So the
code is in classes that inherit from neither; ``integrations/lightning.py`` and
``integrations/pytorch_lightning.py`` join them with the classes of their package.
"""

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from commhooks.adapters.dispatch import is_fully_sharded
from commhooks.adapters.handle import AnyHook, HookHandle, handle_of, register
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook
from commhooks.state.files import KEY, GatheredState, add_state, load_state_of
from reducer import DistributedDataParallel

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


class TrainerStrategy(WrapperStrategy):
    """The methods of ``CommHooksStrategy``."""

    model: Any
    lightning_module: Any
    root_device: torch.device
    _ddp_kwargs: dict[str, Any]

    def _setup_model(self, model: nn.Module) -> Any:
        return self._wrap(model, self.root_device, self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        self._register(self.model)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self.handle is not None and "optimizer_states" in checkpoint:
            add_state(self.handle, checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if self.handle is not None:
            load_state_of(self.handle, checkpoint)


class FabricStrategy(WrapperStrategy):
    """The methods of ``FabricCommHooksStrategy``."""

    root_device: torch.device
    _ddp_kwargs: dict[str, Any]

    def setup_module(self, module: nn.Module) -> Any:
        model = self._wrap(module, self.root_device, self._ddp_kwargs)
        self._register(model)
        return model

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


class HookCallback:
    """The methods of ``CommHookCallback``."""

    def __init__(
        self, hook: AnyHook | None = None, *, log_stats: bool = True, **options: Any
    ) -> None:
        self._hook = hook
        self._options = options
        self._log_stats = log_stats
        self._checkpoint: Mapping[str, Any] | None = None
        self.handle: HookHandle | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the hook, when the strategy has wrapped the model."""
        model = _sharded_part(trainer.strategy.model)
        before = handle_of(model)
        if self._hook is None or (before is not None and before is self.handle):
            self.handle = before  # a sharded model keeps its hook from one `fit` to the next
            return
        try:
            self.handle = register(model, self._hook, **self._options)
        except CommHookError as error:
            if model is not pl_module:
                raise
            raise CommHookError(
                f"{type(trainer.strategy).__name__} does not wrap the model for data-parallel "
                f"training; use Trainer(strategy='ddp') or strategy='commhooks': {error}"
            ) from error

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the state of the hook, when everything else has been restored."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None and self._hook is not None and self.handle is not None:
            load_state_of(self.handle, checkpoint)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Log the statistics."""
        if self._log_stats and self.handle is not None and self.handle.is_registered:
            pl_module.log_dict(metrics(self.handle))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the states of all ranks."""
        if self._hook is not None and self.handle is not None:
            add_state(self.handle, checkpoint)

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]
    ) -> None:
        """Keep the states until there is a hook, unless the model is only evaluated."""
        if trainer.state.fn == "fit":
            self._checkpoint = {key: it for key, it in checkpoint.items() if key == KEY}

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Forget the states if nothing was left to train."""
        self._checkpoint = None


def _sharded_part(model: nn.Module) -> nn.Module:
    """Return the only part of a module that is sharded by itself, or the module."""
    if is_fully_sharded(model):
        return model
    parts = [_sharded_part(child) for child in model.children()]
    sharded = [part for part in parts if is_fully_sharded(part)]
    return sharded[0] if len(sharded) == 1 else model


def metrics(handle: HookHandle) -> dict[str, float]:
    """Return the hook's statistics on this rank by name, for ``self.log_dict()``."""
    stats = handle.stats()
    named = stats.total.scalars() | {f"metrics/{name}": it for name, it in stats.metrics.items()}
    return {f"commhooks/{name}": float(value) for name, value in named.items()}
