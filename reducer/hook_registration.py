"""Register a communication hook through torch's methods, which allow only one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType

from reducer.native import AverageHook, GradBucket, NativeHook, Reducer, Transport

__all__: list[str] = []

TorchHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]
BoundHook = Callable[[GradBucket], torch.futures.Future[Tensor]]

_WIRE_DTYPES = {
    BuiltinCommHookType.ALLREDUCE: None,
    BuiltinCommHookType.FP16_COMPRESS: torch.float16,
}


class HookRegistration:
    """Sets the reducer's hook, and knows what the wrapper must know about it.

    Without a registered hook, the reducer computes the exact average, sent in ``wire_dtype``. All
    attributes are read-only.

    Attributes:
        is_taken: whether a hook was registered through a method of torch's wrapper.
        name: the name of the registered hook; None without one.
        averages_gradients: whether the hook averages gradients, rather than parameters.
        on_overwrite: called between two steps, after the parameters of all ranks were overwritten.
        before_step: called before each synchronized forward; it may set another hook.
    """

    def __init__(self, reducer: Reducer, wire_dtype: torch.dtype | None) -> None:
        self._reducer = reducer
        self._wire_dtype = wire_dtype
        self.reset()

    def install(
        self,
        hook: NativeHook | BoundHook,
        *,
        name: str | None = None,
        averages_gradients: bool = True,
        on_overwrite: Callable[[], None] | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        """Use ``hook`` from the next step on, in place of the present one.

        ``name``: default: that of ``hook``. Raises RuntimeError while a backward is under way.
        """
        self._reducer.set_hook(hook)
        self.is_taken = False
        self.name: str | None = name or self._reducer.hook_name
        self.averages_gradients = averages_gradients
        self.on_overwrite = on_overwrite
        self.before_step = before_step

    def begin_step(self) -> None:
        """Call ``before_step``."""
        if self.before_step is not None:
            self.before_step()

    def reset(self) -> None:
        """Return to the default hook; another hook can then be registered."""
        self.install(AverageHook(self._reducer.process_group, self._wire_dtype))
        self.name = None

    def register(self, state: object, hook: TorchHook) -> None:
        """Register a torch-style hook.

        Raises TypeError if ``hook`` is not callable, RuntimeError if a hook is registered already.
        """
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, found {hook!r}.")
        bound = functools.partial(hook, state)
        # In errors and profiles:
        bound.name = getattr(hook, "__qualname__", type(hook).__qualname__)  # type: ignore[attr-defined]
        self._take(bound)

    def register_builtin(self, kind: BuiltinCommHookType) -> None:
        """Register one of torch's built-in hooks.

        Raises ValueError if ``kind`` is unknown, RuntimeError if a hook is registered already.
        """
        if kind not in _WIRE_DTYPES:
            raise ValueError(
                f"Expected one of {[known.name for known in _WIRE_DTYPES]}, found {kind}."
            )
        average = AverageHook(self._reducer.process_group, _WIRE_DTYPES[kind])
        self._take(average, name=str(kind))

    def move(self, process_group: dist.ProcessGroup, transport: Transport | None) -> None:
        """Average over other ranks from the next step on, with the default hook.

        ``transport``: between them.
        """
        self._reducer.set_process_group(process_group, transport)
        self.reset()

    def _take(self, hook: NativeHook | BoundHook, name: str | None = None) -> None:
        if self.is_taken:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Use "
                "`commhooks.register`, whose handle can replace and remove hooks."
            )
        self.install(hook, name=name)
        self.is_taken = True
