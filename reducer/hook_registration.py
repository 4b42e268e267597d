"""The place for a communication hook that torch's methods fill, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType

from reducer._C import AverageHook, GradBucket, NativeHook, Reducer

__all__: list[str] = []

TorchHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

_WIRE_DTYPES = {
    BuiltinCommHookType.ALLREDUCE: None,
    BuiltinCommHookType.FP16_COMPRESS: torch.float16,
}


class HookRegistration:
    """Holds the reducer's hook; without any, that is the exact average in ``wire_dtype``.

    ``averages_gradients``: the hook does, over all ranks, in some way. ``on_overwrite``: called
    between two steps when the parameters of all ranks have been overwritten.
    """

    def __init__(self, reducer: Reducer, wire_dtype: torch.dtype | None) -> None:
        self._reducer = reducer
        self._wire_dtype = wire_dtype
        self.is_taken = False
        self.averages_gradients = True
        self.on_overwrite: Callable[[], None] | None = None
        reducer.set_hook(self.default())

    def default(self) -> NativeHook:
        """The exact average over the ranks that the reducer has now."""
        return AverageHook(self._reducer.process_group, self._wire_dtype)

    def register(self, state: object, hook: TorchHook) -> None:
        """Raises TypeError for what cannot be called, RuntimeError the second time."""
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, found {hook!r}.")
        self._take()
        self._reducer.set_hook(functools.partial(hook, state))

    def register_builtin(self, kind: BuiltinCommHookType) -> None:
        """Raises ValueError for what is not one of torch's, RuntimeError the second time."""
        if kind not in _WIRE_DTYPES:
            raise ValueError(
                f"Expected one of {[known.name for known in _WIRE_DTYPES]}, found {kind}."
            )
        self._take()
        self._reducer.set_hook(AverageHook(self._reducer.process_group, _WIRE_DTYPES[kind]))

    def move(self, process_group: dist.ProcessGroup) -> None:
        """Averages over other ranks from the next step on; the adapter is empty again."""
        self._reducer.process_group = process_group
        self._reducer.set_hook(self.default())
        self.is_taken = False
        self.averages_gradients = True
        self.on_overwrite = None

    def _take(self) -> None:
        if self.is_taken:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Use "
                "`commhooks.register`, whose handle can replace and remove hooks."
            )
        self.is_taken = True
