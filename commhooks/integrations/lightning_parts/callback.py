"""A callback that registers a hook, whatever the strategy, and logs what it costs."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from commhooks.adapters.fully_sharded import is_fully_sharded
from commhooks.adapters.handle import AnyHook, HookHandle, handle_of, register
from commhooks.errors import CommHookError
from commhooks.state.files import KEY, add_state, load_state_of

__all__ = ["HookCallback", "metrics"]


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
        """Keep the states until there is a hook."""
        self._checkpoint = {key: it for key, it in checkpoint.items() if key == KEY}


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
