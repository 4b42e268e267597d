"""The Trainer's strategy: what its ``DDPStrategy`` does for torch's wrapper only."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commhooks.integrations.lightning_parts.strategy import WrapperStrategy
from commhooks.state.files import add_state, load_state_of
from reducer import DistributedDataParallel

__all__ = ["TrainerStrategy"]


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

    def pre_backward(self, closure_loss: Tensor) -> None:
        """In manual optimization, backward runs before forward has returned and prepared it."""
        model = self.model
        if (
            isinstance(model, DistributedDataParallel)
            and not self.lightning_module.automatic_optimization
            and model.require_backward_grad_sync
        ):
            model.reducer.prepare_for_backward([closure_loss])

    def teardown(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()  # type: ignore[misc]

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self.handle is not None and "optimizer_states" in checkpoint:
            add_state(self.handle, checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if self.handle is not None:
            load_state_of(self.handle, checkpoint)
