"""The place in a wrapped model that takes a hook: what our wrapper and torch's have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from commhooks.driver import Driver
from commhooks.errors import CommHookError
from commhooks.hook import CommHook
from commhooks.inline import InlineDriver
from commhooks.stats import HookStats, bucket_stats
from commhooks.wire import all_reduce_bytes
from reducer import DistributedDataParallel
from reducer._C import AverageHook

__all__ = ["AnyDriver", "OwnSlot", "Slot", "TorchHook", "make_driver", "trained_parameters"]

AnyDriver = Driver | InlineDriver
TorchHook = Callable[[Any], Future[Tensor]]
"""A torch-style hook with its state bound."""


class Slot(ABC):
    """Holds what it needs of a model, but not the model, which may go away.

    ``parameters``: the trained ones by name, as :class:`CommHook` knows them.
    """

    group: dist.ProcessGroup
    device: torch.device
    parameters: dict[str, Tensor]

    @property
    @abstractmethod
    def steps(self) -> int:
        """The synchronised backward passes so far; can be set by a resumed run."""

    @steps.setter
    @abstractmethod
    def steps(self, steps: int) -> None: ...

    @abstractmethod
    def install(self, hook: CommHook, token: int) -> None:
        """Uses a hook from the next step on. ``token``: as for Driver."""

    @abstractmethod
    def install_function(self, hook: TorchHook) -> None:
        """Uses a torch-style function from the next step on."""

    @abstractmethod
    def clear(self) -> None:
        """Goes back to the plain average."""

    @abstractmethod
    def stats(self) -> HookStats:
        """Of the hook that is installed, since it was."""


class OwnSlot(Slot):
    """Of our own wrapper."""

    def __init__(self, model: DistributedDataParallel) -> None:
        if model._has_comm_hook:  # noqa: SLF001
            raise CommHookError(
                "the model has a hook already, from register_comm_hook(), which can neither be "
                "replaced nor removed; use commhooks.register() instead"
            )
        self.group = model.process_group
        self.device = model.device
        self.parameters = trained_parameters(model.module)
        self._reducer = model.reducer
        self._driver: AnyDriver | None = None
        self._is_native = False

    @property
    def steps(self) -> int:
        return self._reducer.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._reducer.steps = steps

    def install(self, hook: CommHook, token: int) -> None:
        native = hook.native(self.group)
        driver = make_driver(hook, self.group, self.device, token) if native is None else None
        self._set(native if driver is None else driver, driver, is_native=native is not None)

    def install_function(self, hook: TorchHook) -> None:
        self._set(hook, None, is_native=False)

    def clear(self) -> None:
        self._set(AverageHook(self.group), None, is_native=True)

    def stats(self) -> HookStats:
        size = self.group.size()
        rows = self._reducer.bucket_stats()
        buckets = [
            bucket_stats(
                size,
                index=row["index"],
                names=row["names"],
                gradient_bytes=row["gradient_bytes"],
                wire_bytes=self._wire_bytes(row),
                hook_seconds=row["hook_seconds"] / max(row["steps"], 1),
                exposed_seconds=row["exposed_seconds"] / max(row["steps"], 1),
            )
            for row in rows
        ]
        return HookStats.of(max((row["steps"] for row in rows), default=0), buckets, size)

    def _set(self, target: Any, driver: AnyDriver | None, *, is_native: bool) -> None:
        self._reducer.set_hook(target)  # raises while a backward is under way
        self._reducer.reset_stats()
        if self._driver is not None:
            self._driver.close()
        self._driver = driver
        self._is_native = is_native

    def _wire_bytes(self, row: dict[str, Any]) -> float | None:
        if self._driver is not None:
            return self._driver.ledger.wire_bytes(row["key"])
        if self._is_native:  # one all-reduce of what was packed, or nothing was packed
            packed = row["packed_bytes"] // max(row["steps"], 1)
            return all_reduce_bytes(packed, self.group.size())
        return None


def trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    """By name, in the module's order, without those that a wrapper was told to ignore."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def make_driver(
    hook: CommHook, group: dist.ProcessGroup, device: torch.device, token: int
) -> AnyDriver:
    """What runs the hook's coroutines, as the backend of ``group`` for ``device`` needs it."""
    backend = group._get_backend(device).name()  # noqa: SLF001
    if device.type == "cpu" and backend == "gloo" and group.size() > 1:
        return Driver(hook, group, token)
    return InlineDriver(hook, group)
