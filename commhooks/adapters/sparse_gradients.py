"""The gradients of ``nn.Embedding(sparse=True)`` and ``nn.EmbeddingBag(sparse=True)`` in torch."""

import functools
import weakref
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from commhooks.comm.exchange import completed
from commhooks.comm.wire import all_gather_bytes
from reducer.construction import sparse_parameters


class SparseGradients:
    """Gives gradients the form that torch's wrapper expects of them before it looks.

    Torch raises an error if a parameter that it expects to have a sparse gradient has a dense one,
    because it has other uses too, or none, because only other ranks use it; and if there is a
    sparse one where it expects a dense one.

    Args:
        wrapped: The module that torch's wrapper has got.
        parameters: Those that are averaged.
        module: The module whose embeddings count; ``wrapped`` may be a list of its parameters.
        fill_unused: Whether the wrapper allows unused parameters.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        parameters: Collection[Tensor],
        module: nn.Module,
        *,
        fill_unused: bool,
    ) -> None:
        expected = _expected(wrapped)
        self.parameters = [parameter for parameter in parameters if parameter in expected]
        """Parameters with sparse gradients. Each has a bucket of its own."""
        self._filled: list[Tensor] = []  # in this step
        for parameter in sparse_parameters(module).intersection(parameters):
            _listen(parameter, functools.partial(_fit_layout, parameter in expected))
        if self.parameters and fill_unused:
            for parameter in parameters:  # torch looks when the first gradient of a step has come
                _listen(parameter, functools.partial(_fill, weakref.ref(self)))

    def fill(self) -> None:
        """Set a gradient without rows where there is none yet."""
        for parameter in self.parameters:
            if parameter.grad is None:
                shape = parameter.shape
                no_rows = torch.zeros_like(parameter, layout=torch.sparse_coo, requires_grad=False)
                parameter.grad = no_rows.sparse_resize_and_clear_(shape, 1, len(shape) - 1)
                self._filled.append(parameter)

    def end_step(self) -> None:
        """Remove the gradients of parameters that no rank has used."""
        while self._filled:
            parameter = self._filled.pop()
            if parameter.grad is not None and parameter.grad._nnz() == 0:  # noqa: SLF001
                parameter.grad = None


def average_rows(gradient: Tensor, group: dist.ProcessGroup) -> tuple[Future[Tensor], int]:
    """Return a future of the exact average of a sparse gradient, and the bytes sent for it.

    The gradient itself does not change: its values may be those of a gradient that backward still
    reads.
    """
    size, dtype = group.size(), gradient.dtype
    if size == 1:
        return completed(gradient), 0
    wide = torch.float32 if dtype == torch.float16 else dtype  # Gloo cannot add sparse float16
    rows = (gradient.to(wide).coalesce() / size).coalesce()
    packed = rows.indices().nbytes + rows.values().nbytes
    future = dist.all_reduce(rows, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].to(dtype)), all_gather_bytes(packed, size)


def _expected(wrapped: nn.Module) -> set[Tensor]:
    """Return the parameters for which torch expects sparse gradients: the first owner decides."""
    last_first = reversed(list(wrapped.modules()))
    owner = {parameter: each for each in last_first for parameter in each.parameters(recurse=False)}
    return {
        parameter
        for parameter, module in owner.items()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def _listen(parameter: Tensor, function: Callable[[Tensor], None]) -> None:
    parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]


def _fit_layout(is_sparse: bool, parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse != is_sparse:
        grad = parameter.grad
        parameter.grad = grad.to_sparse(1) if is_sparse else grad.to_dense()


def _fill(gradients: weakref.ref[SparseGradients], _: Tensor) -> None:
    alive = gradients()
    if alive is not None:
        alive.fill()
