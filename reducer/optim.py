"""Use averaged gradients inside backward: call observers, and step optimizers.

::

    bucket 0   |-- hook --|step|
    bucket 1        |-- hook --|step|
    backward   |---------------------------|wait|

An optimizer steps the parameters of one bucket at a time: its parameter groups are restricted to
them for the call of ``step()``. Its state, its options and its learning-rate schedulers are
therefore those of one ordinary optimizer.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from reducer.errors import expect
from reducer.wrapper import Wrapper


class OverlappedOptimizer:
    """Steps an optimizer in backward. Made by :func:`overlap_optimizer`.

    ``optimizer`` is the ordinary optimizer that does the work: use it for learning-rate schedulers
    and checkpoints, and do not call its ``step()``.
    """

    def __init__(
        self,
        model: Wrapper,
        optimizer: torch.optim.Optimizer,
        *,
        clear_gradients: bool,
    ) -> None:
        self.optimizer = optimizer
        self._clear_gradients = clear_gradients
        # A weak reference, because the reducer, in C++, keeps a reference to the observers.
        self._remove = weakref.WeakMethod(model.remove_gradient_observer)
        model.add_gradient_observer(self.step)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters that the optimizer has now: ``add_param_group`` may add some."""
        return {p for group in self.optimizer.param_groups for p in group["params"]}

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Step those of ``parameters`` that this optimizer has. Called by the reducer."""
        ready = self.parameters.intersection(parameters)
        if not ready:
            return
        with _only(self.optimizer, ready), torch.no_grad():
            self.optimizer.step()
        if self._clear_gradients:
            for parameter in ready:
                parameter.grad = None

    def remove(self) -> None:
        """Stop stepping in backward; call ``optimizer.step()`` after backward from now on."""
        if remove := self._remove():
            remove(self.step)


def overlap_optimizer(
    model: nn.Module,
    optim_cls: type[torch.optim.Optimizer],
    params: Iterable[Any] | None = None,
    *args: Any,
    clear_gradients: bool = True,
    **kwargs: Any,
) -> OverlappedOptimizer:
    """Step each parameter in backward, as soon as its averaged gradient is available.

    Works with any communication hook, and any optimizer that updates each parameter by itself.
    ``step()`` is called once per bucket: optimizers that count steps in their groups, such as
    schedule-free ones and Prodigy, or look at all parameters, such as LBFGS, would train in another
    way, without an error. Under ``no_sync()`` gradients accumulate, and
    the step follows in the first synchronized backward. May be called several times, for disjoint
    sets of parameters. Methods that need all gradients before the first step cannot be used:
    clipping by the global norm, ``GradScaler``. If a backward fails, the parameters of buckets that
    were complete have already been updated.

    Args:
        model: a ``commhooks.DistributedDataParallel``.
        optim_cls: the class of the optimizer, made as ``optim_cls(params, *args, **kwargs)``.
        params: parameters or groups, as for any optimizer; default: all of the model's.
        *args: passed to ``optim_cls``.
        **kwargs: passed to ``optim_cls``.
        clear_gradients: set ``.grad`` to None after the step, which frees its memory.

    Raises:
        TypeError: ``model`` is not wrapped, or ``optim_cls`` is no class.
        ValueError: ``model`` does not average a parameter, or another optimizer steps it already.
    """
    if not hasattr(model, "add_gradient_observer"):
        raise TypeError(
            f"Expected a commhooks.DistributedDataParallel, found {type(model).__name__}; torch's "
            "own wrapper has no way to step in backward under a hook."
        )
    expect(Callable, optim_cls=optim_cls)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim_cls(trained if params is None else params, *args, **kwargs)
    wrapper: Any = model  # or what passes its attributes through, such as a compiled module
    _check_parameters(wrapper, optimizer)
    return OverlappedOptimizer(wrapper, optimizer, clear_gradients=clear_gradients)


def _check_parameters(model: Wrapper, optimizer: torch.optim.Optimizer) -> None:
    names = model.parameter_names
    taken: set[Tensor] = set()
    for observer in model.gradient_observers:
        owner = getattr(observer, "__self__", None)
        if isinstance(owner, OverlappedOptimizer):
            taken |= owner.parameters
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"A parameter of shape {tuple(parameter.shape)} is not one whose gradients the "
                    "model averages; use an optimizer that steps after backward for it."
                )
            if parameter in taken:
                raise ValueError(
                    f'Parameter "{names[parameter]}" is stepped in backward by another optimizer '
                    "already."
                )


@contextmanager
def _only(optimizer: torch.optim.Optimizer, parameters: set[Any]) -> Iterator[None]:
    """Restrict the optimizer's groups to ``parameters``."""
    all_parameters = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p in parameters]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, all_parameters, strict=True):
            group["params"] = params


def take_over_in_backward_optimizers(model: Wrapper) -> None:
    """Step the optimizers of torch's ``_apply_optimizer_in_backward`` after the average.

    Torch's own autograd hooks, which are removed, would step them before it.
    """
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
