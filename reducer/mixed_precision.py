"""Run a module in low precision while parameters and gradients stay in full precision.

Note [Mixed precision]
~~~~~~~~~~~~~~~~~~~~~~
During a forward and its backward, the attributes of the modules are not the parameters, but
differentiable casts of them:

    parameter (fp32) --cast--> attribute (bf16) --forward--> loss
    .grad (fp32)     <--cast-- gradient (bf16)  <--backward--

Autograd itself therefore casts gradients back to full precision. They accumulate in full precision,
are averaged (sent in ``reduce_dtype``, or by the user's hook) and are used by the optimizer.
Parameters never change their dtype, so optimizers, hooks and checkpoints need not know about the
casts. The casts stay until backward has ended, because activation checkpointing runs parts of the
forward again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from reducer.nested_tensors import map_tensors, tensors_in


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of mixed-precision training; torch's ``_MixedPrecision`` is accepted as well.

    Args:
        param_dtype: dtype of parameters and inputs during the computation; None: unchanged.
        reduce_dtype: dtype in which the default average is sent; None: ``param_dtype``.
        buffer_dtype: dtype of buffers; None: unchanged.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class ParameterCasts:
    """Replaces parameters with casts during forward and backward. See Note [Mixed precision].

    ``mixed_precision``: has the attributes of :class:`MixedPrecision`; None: runs the module
    unchanged. ``wire_dtype``: of the default average; None: that of the gradients.
    """

    def __init__(self, module: nn.Module, mixed_precision: Any, ignored: set[str]) -> None:
        dtypes = MixedPrecision() if mixed_precision is None else mixed_precision
        found = [getattr(dtypes, field.name, "absent") for field in fields(MixedPrecision)]
        if not all(isinstance(each, torch.dtype | None) for each in found):
            raise TypeError(
                "expected, for example, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16);"
                f" found {mixed_precision!r}"
            )
        self._dtype: torch.dtype | None = dtypes.param_dtype
        self.wire_dtype: torch.dtype | None = dtypes.reduce_dtype or dtypes.param_dtype
        self._module = module
        self._ignored = ignored
        self._replaced: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # by the last one
        if self._dtype is not None:
            # A checkpoint must not contain casts, even if no backward followed the last forward.
            module.register_state_dict_pre_hook(self._restore_before_saving)  # type: ignore[no-untyped-call]
        if dtypes.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(dtypes.buffer_dtype)

    def cast_inputs(self, inputs: Any) -> Any:
        """Cast all floating-point tensors in a nested structure to ``param_dtype``."""
        dtype = self._dtype
        if dtype is None:
            return inputs
        return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)

    @contextmanager
    def casting(self) -> Iterator[Callable[[Any], None]]:
        """Return a context for a forward.

        Yields ``keep(outputs)``, which keeps the casts until the backward of these outputs has
        ended.
        """
        if (dtype := self._dtype) is None:
            yield lambda _outputs: None
            return
        self.restore()
        found = [  # each time: users prune and parametrize modules that have been wrapped
            (owner, name, parameter)
            for prefix, owner in self._module.named_modules()
            for name, parameter in owner._parameters.items()  # noqa: SLF001
            if parameter is not None
            and parameter.is_floating_point()
            and f"{prefix}.{name}".lstrip(".") not in self._ignored
        ]
        casts = {parameter: parameter.to(dtype) for *_, parameter in found}
        self._replaced = [(*place, parameter, casts[parameter]) for *place, parameter in found]
        for owner, name, _, cast in self._replaced:
            _put(owner, name, cast)
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
        """Replace the casts with the parameters, except where something else is by now."""
        for owner, name, original, cast in self._replaced:
            # Some of torch's functions put parameters back before backward: functional_call.
            if name in owner._parameters:  # noqa: SLF001
                current = owner._parameters[name]  # noqa: SLF001
                _put(owner, name, original if current is cast else current)
        self._replaced = []

    def _restore_before_saving(self, *_: Any) -> None:
        self.restore()

    def _restore_after_backward(self, _grad: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.restore)  # noqa: SLF001


def _put(owner: nn.Module, name: str, tensor: Any) -> None:
    owner._parameters[name] = tensor  # noqa: SLF001
    # Has a list of its own, without what weights are computed from.
    if isinstance(owner, nn.RNNBase) and name in owner._flat_weights_names:  # noqa: SLF001
        owner._flat_weights[owner._flat_weights_names.index(name)] = tensor  # noqa: SLF001
