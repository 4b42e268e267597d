"""Who takes part in a comparison."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from commhooks.adapters.handle import HookHandle, register
from commhooks.hook.registry import create
from commhooks.hook.spec import HookSpec
from reducer import DistributedDataParallel

__all__ = ["BARE", "TORCH", "Contender", "contenders"]


@dataclass(frozen=True)
class Contender:
    """A way for gradients to travel. ``config``: of the hook, None for those without one."""

    name: str
    config: Mapping[str, Any] | None = None

    @property
    def changes_parameters(self) -> bool:
        """Whether steps do, besides gradients."""
        return self.config is not None and create(self.config).changes_parameters

    def wrap(self, module: nn.Module) -> tuple[nn.Module, HookHandle | None]:
        """The module in the wrapper that it is measured in. A collective, but for the bare one."""
        if self == BARE:
            return module, None
        if self == TORCH:
            return TorchDistributedDataParallel(module), None
        assert self.config is not None
        model = DistributedDataParallel(module)
        return model, register(model, self.config)


BARE = Contender("bare")
"""The module alone: nothing travels."""
TORCH = Contender("torch")
"""torch's own wrapper and plain average, against which all others are held."""


def contenders(hooks: list[HookSpec]) -> list[Contender]:
    """The two above, and the hooks."""
    return [BARE, TORCH, *(Contender(spec.text, spec.config) for spec in hooks)]
