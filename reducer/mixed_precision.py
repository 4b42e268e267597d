"""Runs a module in low precision, with parameters and gradients kept in full precision.

Note [Mixed precision]
~~~~~~~~~~~~~~~~~~~~~~
For the time of a forward and its backward, the attributes of the modules are not the parameters but
differentiable casts of them:

    parameter (fp32) --cast--> attribute (bf16) --forward--> loss
    .grad (fp32)     <--cast-- gradient (bf16)  <--backward--

So autograd itself brings gradients back to full precision, where they accumulate, are averaged (in
``reduce_dtype``, or by the user's hook) and are seen by the optimizer; parameters never change
their type, and optimizers, hooks and checkpoints need not know. The casts stay in place until
backward is over because activation checkpointing runs parts of forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reducer.outputs import map_tensors, tensors_in

__all__ = ["MixedPrecision"]


@dataclass(frozen=True)
class MixedPrecision:
    """Which dtypes to use; None: the parameters' own. Torch's ``_MixedPrecision`` does as well.

    ``param_dtype``: of parameters and inputs, and so of the computation. ``reduce_dtype``: of the
    default average on the wire; by default ``param_dtype``. ``buffer_dtype``: of buffers.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, config: Any) -> MixedPrecision:
        """From anything with these three attributes."""
        return cls(config.param_dtype, config.reduce_dtype, config.buffer_dtype)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """In which the default average travels."""
        return self.reduce_dtype or self.param_dtype


def casts_of(module: nn.Module, mixed_precision: Any, ignored: set[str]) -> CastModule | NoCasts:
    """``mixed_precision``: as :class:`MixedPrecision`, or None for a module that runs as it is."""
    if mixed_precision is None:
        return NoCasts()
    return CastModule(module, MixedPrecision.of(mixed_precision), ignored)


class NoCasts:
    """Runs the module as it is."""

    wire_dtype: torch.dtype | None = None

    def cast_inputs(self, inputs: Any) -> Any:
        """As they are."""
        return inputs

    def casting(self) -> AbstractContextManager[Callable[[Any], None]]:
        """For a forward."""
        return nullcontext(_keep_nothing)

    def restore(self) -> None:
        """Nothing is to be restored."""


def _keep_nothing(_outputs: Any) -> None:
    pass


class CastModule:
    """Puts casts of parameters in the place of parameters. See Note [Mixed precision]."""

    def __init__(self, module: nn.Module, dtypes: MixedPrecision, ignored: set[str]) -> None:
        self._dtypes = dtypes
        self.wire_dtype = dtypes.wire_dtype
        self._places = [
            (owner, name)
            for prefix, owner in module.named_modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if f"{prefix}.{name}".lstrip(".") not in ignored and parameter.is_floating_point()
        ]
        self._originals: list[nn.Parameter] = []
        # No checkpoint may hold casts, also of a forward that no backward followed.
        module.register_state_dict_pre_hook(self._restore_before_saving)  # type: ignore[no-untyped-call]
        if dtypes.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(dtypes.buffer_dtype)

    def cast_inputs(self, inputs: Any) -> Any:
        """Floating-point tensors in ``param_dtype``, whatever they are nested in."""
        dtype = self._dtypes.param_dtype
        if dtype is None:
            return inputs
        return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)

    @contextmanager
    def casting(self) -> Iterator[Callable[[Any], None]]:
        """For a forward. Call what it gives with the outputs: casts stay until backward is over."""
        self.restore()
        self._cast()
        keeps = False

        def keep(outputs: Any) -> None:
            nonlocal keeps
            for tensor in tensors_in(outputs):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._restore_after_backward)  # type: ignore[no-untyped-call]
                    keeps = True

        try:
            yield keep
        finally:
            if not keeps:
                self.restore()

    def restore(self) -> None:
        """Puts the parameters back in their places."""
        if self._originals:
            self._put(self._originals)
            self._originals = []

    def _cast(self) -> None:
        dtype = self._dtypes.param_dtype
        if dtype is None:
            return
        self._originals = [owner._parameters[name] for owner, name in self._places]  # noqa: SLF001
        shared = {parameter: parameter.to(dtype) for parameter in self._originals}
        self._put([shared[parameter] for parameter in self._originals])

    def _put(self, tensors: list[Any]) -> None:
        for (owner, name), tensor in zip(self._places, tensors, strict=True):
            owner._parameters[name] = tensor  # noqa: SLF001
            if isinstance(owner, nn.RNNBase):  # keeps a list of its own
                owner._flat_weights[owner._flat_weights_names.index(name)] = tensor  # noqa: SLF001

    def _restore_before_saving(self, *_: Any) -> None:
        self.restore()

    def _restore_after_backward(self, _grad: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.restore)  # noqa: SLF001
