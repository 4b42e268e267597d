"""The entries of a comparison: the bare model, torch DDP, and one for each hook."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from commhooks.adapters.handle import HookHandle, register
from commhooks.adapters.wrapper import wrap
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.base import is_lossless, tree
from commhooks.hook.registry import create
from commhooks.hook.spec import HookLike, hook_spec


@dataclass(frozen=True)
class Entry:
    """One way to average gradients. ``config`` is the hook's, or None if there is no hook."""

    name: str
    config: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, hook: HookLike) -> "Entry":
        """Return the entry of a hook. Raises the errors of :func:`hook_spec`."""
        spec = hook_spec(hook)
        return cls(spec.text, spec.config)

    @property
    def changes_parameters(self) -> bool:
        """Whether a step changes parameters as well as gradients."""
        hooks = () if self.config is None else tree(create(self.config))
        return any(each.changes_parameters for each in hooks)

    @property
    def is_exact(self) -> bool:
        """Whether the entry averages exactly, up to rounding."""
        made = None if self.config is None else create(self.config)
        return self == TORCH or (made is not None and is_lossless(made))

    def wire_bytes(self, gradient_bytes: int, world_size: int) -> int:
        """Return the bytes that a rank sends in a step, if there is no hook to count them."""
        return 0 if self == BARE else all_reduce_bytes(gradient_bytes, world_size)

    def wrap(self, module: nn.Module, **options: Any) -> tuple[nn.Module, HookHandle | None]:
        """Wrap the module as this entry needs it. Collective, except for the bare entry.

        ``options`` are those of the wrappers: ``init_sync=False`` if all ranks have the same model.
        Each rank stands for a host, so host memory is used only if they ask for it.
        """
        host_memory = options.pop("host_memory", False)
        if self == BARE:
            return module, None
        if self == TORCH:
            return TorchDistributedDataParallel(module, **options), None
        assert self.config is not None
        model = wrap(module, host_memory=host_memory, **options)
        return model, register(model, self.config)


BARE = Entry("bare")
"""The module without a wrapper; nothing is sent."""
TORCH = Entry("torch")
"""torch DDP with its plain average, the baseline of every comparison."""
