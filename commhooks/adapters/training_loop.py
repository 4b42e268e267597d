"""Checks of training loops that a hook cannot follow, installed together with the hook."""

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from commhooks.errors import CommHookError
from commhooks.state.layout import DistributedModel
from reducer.nested_tensors import tensors_in

_CHECKED_STEPS = 64
_DISCARDED_BEFORE_WARNING = 4


class LateBackwards:
    """A forward hook: raises CommHookError in backwards of graphs that a change made invalid.

    For hooks that change parameters, which they do in the synchronized backward. Autograd's own
    error, "modified by an inplace operation", names neither the hook nor the remedy.
    """

    def __init__(self, adapter: DistributedModel, name: str) -> None:
        self._adapter = weakref.ref(adapter)
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_hook_of_copy, ()  # the copy has no communication hook

    @_disable_dynamo
    def __call__(self, _wrapper: nn.Module, _inputs: Any, output: Any) -> None:
        adapter = self._adapter()
        if adapter is None or not torch.is_grad_enabled():
            return
        check = functools.partial(self._check, adapter.steps, _versions(adapter))
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(check)  # type: ignore[no-untyped-call]

    def _check(self, steps: int, versions: list[int], _gradient: Tensor) -> None:
        adapter = self._adapter()
        if adapter is None or adapter.steps == steps or _versions(adapter) == versions:
            return
        raise CommHookError(
            f"[rank {adapter.rank}] {self._name!r} changes parameters in synchronized backwards. "
            f"It changed some in step {adapter.steps - 1}, after the forward whose backward begins "
            "now. Run forward and backward in no_sync() before the synchronized forward, or add up "
            "the losses and call backward once"
        )


class DiscardedGradients:
    """Warns once if averages are cleared again and again without a change of the parameters.

    GANs discard the discriminator's gradients of the generator's step. Error feedback keeps what
    was not sent of them, and adds it to the next ones. Gradient scalers discard some in a row.
    """

    def __init__(self, adapter: DistributedModel, name: str) -> None:
        self._adapter = weakref.ref(adapter)
        self._name = name
        self._step, self._versions = adapter.steps, _versions(adapter)
        self._times = 0
        self._discards = False

    def before_step(self) -> None:
        """Compare the parameters with those before the last step, in the first steps."""
        adapter = self._adapter()
        if adapter is None or self._step == adapter.steps:
            return
        if adapter.steps > _CHECKED_STEPS or self._times == _DISCARDED_BEFORE_WARNING:
            return
        versions = _versions(adapter)
        parameter = next(iter(adapter.parameters.values()), None)
        is_cleared = parameter is not None and parameter.grad is None
        discards = is_cleared and versions == self._versions
        self._times += discards and not self._discards
        self._step, self._versions, self._discards = adapter.steps, versions, discards
        if self._times == _DISCARDED_BEFORE_WARNING and adapter.rank == 0:
            warnings.warn(
                f"Gradients that {self._name!r} has averaged were cleared without a change of the "
                "parameters, as those of a discriminator in the generator's step. The hook keeps "
                "errors of them, which go into the next gradients. Freeze the parameters in such "
                "steps, or run these in no_sync(): see docs/composing.md, Discarded gradients",
                stacklevel=2,
            )


def _versions(adapter: DistributedModel) -> list[int]:
    return [parameter._version for parameter in adapter.parameters.values()]  # noqa: SLF001


def _forward_hook_of_copy() -> Any:
    return _nothing


def _nothing(*_: Any) -> None:
    pass
