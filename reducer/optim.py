"""Optimizer steps inside backward: each parameter's as soon as its gradient has been averaged.

::

    bucket 0   |-- hook --|step|
    bucket 1        |-- hook --|step|
    backward   |---------------------------|wait|

An optimizer steps the parameters of one bucket at a time, by seeing only these in its groups, so
its state, its options and the schedulers around it are those of one ordinary optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from reducer.distributed import DistributedDataParallel

__all__ = ["OverlappedOptimizer", "overlap_optimizer"]


class OverlappedOptimizer:
    """An optimizer that steps in backward; ``optimizer`` is the ordinary one that does the work.

    Use that for learning-rate schedulers and checkpoints, and do not call its ``step()``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        clear_gradients: bool,
    ) -> None:
        self.optimizer = optimizer
        self._clear_gradients = clear_gradients
        self._parameters = {p for group in optimizer.param_groups for p in group["params"]}
        # Weakly, as the model's reducer, in C++, keeps the observers.
        self._model = weakref.ref(model)
        model.add_gradient_observer(self.step)

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Steps those of ``parameters`` that this optimizer has. Called by the reducer."""
        ready = self._parameters.intersection(parameters)
        if not ready:
            return
        with _only(self.optimizer, ready), torch.no_grad():
            self.optimizer.step()
        if self._clear_gradients:
            for parameter in ready:
                parameter.grad = None

    def remove(self) -> None:
        """Back to calling ``optimizer.step()`` after backward."""
        if model := self._model():
            model.remove_gradient_observer(self.step)


def overlap_optimizer(
    model: DistributedDataParallel,
    optim_cls: type[torch.optim.Optimizer],
    params: Iterable[Any] | None = None,
    *args: Any,
    clear_gradients: bool = True,
    **kwargs: Any,
) -> OverlappedOptimizer:
    """Steps each parameter in backward, as soon as the average of its gradient is there.

    Works with any communication hook and optimizer. Under ``no_sync()`` gradients accumulate, and
    the step follows in the first synchronized backward. May be called several times, for disjoint
    sets of parameters. What needs all gradients before the first step does not fit: clipping by the
    global norm, ``GradScaler``. If a backward fails, parameters whose buckets were done have been
    updated.

    Args:
        model: a ``commhooks.DistributedDataParallel``.
        optim_cls: the class of the optimizer, made as ``optim_cls(params, *args, **kwargs)``.
        params: parameters or groups, as for any optimizer; default: all of the model's.
        *args: passed on.
        **kwargs: passed on.
        clear_gradients: set ``.grad`` to None after the step, which frees their memory.

    Raises:
        TypeError: ``model`` is not wrapped.
        ValueError: ``model`` does not average a parameter, or another optimizer steps it already.
    """
    from reducer.distributed import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"Expected a commhooks.DistributedDataParallel, found {type(model).__name__}; torch's "
            "own wrapper has no way to step in backward under a hook."
        )
    trained = [p for p in model.module.parameters() if p.requires_grad]
    optimizer = optim_cls(trained if params is None else params, *args, **kwargs)
    _check_parameters(model, optimizer)
    return OverlappedOptimizer(model, optimizer, clear_gradients=clear_gradients)


def _check_parameters(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    names = model.parameter_names
    taken: set[Tensor] = set()
    for observer in model.gradient_observers:
        owner = getattr(observer, "__self__", None)
        if isinstance(owner, OverlappedOptimizer):
            taken |= owner._parameters  # noqa: SLF001
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"A parameter of shape {tuple(parameter.shape)} is not one whose gradients the "
                    "model averages; leave it to an optimizer that steps after backward."
                )
            if parameter in taken:
                raise ValueError(
                    f'Parameter "{names[parameter]}" is stepped in backward by another optimizer '
                    "already."
                )


@contextmanager
def _only(optimizer: torch.optim.Optimizer, parameters: set[Any]) -> Iterator[None]:
    """As if the optimizer had no other parameters."""
    all_parameters = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p in parameters]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, all_parameters, strict=True):
            group["params"] = params


def take_over_in_backward_optimizers(model: DistributedDataParallel) -> None:
    """Those of torch's ``_apply_optimizer_in_backward``, which would step before the average."""
    waiting = {p for p in model.parameter_names if hasattr(p, "_in_backward_optimizers")}
    if not waiting:
        return
    from torch.distributed.optim import apply_optimizer_in_backward

    handles: Any = apply_optimizer_in_backward.param_to_optim_hook_handle_map

    for parameter in waiting:
        for handle in handles.get(parameter, []):
            handle.remove()

    def step(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in waiting.intersection(parameters):
            for optimizer in parameter._in_backward_optimizers:  # noqa: SLF001
                optimizer.step()
            parameter.grad = None

    model.add_gradient_observer(step)
