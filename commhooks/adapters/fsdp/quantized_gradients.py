"""Gradients between the shards of a model: a quantized reduce-scatter.

::

    messages = [encode(part) for part in flat.split(n / N)]    # part r: what rank r keeps
    received = all_to_all(messages)
    shard = mean([decode(message) for message in received])    # in float32

That is the first half of the two-shot all-reduce in algorithms/quantized/base.py: each number
is rounded once, and the mean is not. Nothing is remembered. Error feedback would need an error for
each parameter of the *whole* model on each rank, which is what sharding avoids.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.adapters.fsdp.quantized import (
    Numbers,
    QuantizedCollective,
    UnitCollective,
    quantize,
    real,
)
from commhooks.comm.wire import all_to_all_bytes, reduce_scatter_bytes
from reducer.peers import collective


def quantize_reduce_scatter(
    model: nn.Module, numbers: Numbers = "int8", /, **options: Any
) -> QuantizedCollective:
    """Reduce-scatter the gradients of a sharded model in few bits, from the next step on.

    Collective over the ranks that ``model`` is sharded over. It works with one and two dimensions
    of the mesh, and together with a hook between replicas.

    Args:
        model: The root module, after ``fully_shard``.
        numbers: How numbers are sent: the name of a hook that quantizes, such as "int8", "int4" or
            "fp8", or a config; or "bf16". Sums are in float32. Errors are not fed back.
        **options: The options of that hook.

    Raises:
        CommHookError: ``model`` is not the root of a sharded model, or has one already.
        CommHookMismatchError: The ranks gave different arguments; on every rank.
    """
    return quantize(model, _ReduceScatter, numbers, options)


class _ReduceScatter(UnitCollective):
    name = "reduce_scatter"
    _calls = 0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        size = group.size()
        input_tensor, output_tensor = real(input_tensor), real(output_tensor)
        seed = f"{self._index}:{self._calls}:{group.rank()}"
        self._calls += 1
        messages = self._format.encode(input_tensor, size, seed)
        received = torch.empty_like(messages)
        with collective(group, "the quantized reduce-scatter"):
            dist.all_to_all_single(received, messages, group=group)
        average = output_tensor
        if output_tensor.dtype != torch.float32:
            average = torch.empty_like(output_tensor, dtype=torch.float32)
        self._format.average(received, average)
        if op != dist.ReduceOp.AVG:
            average.mul_(self._scale(op, size))
        if average is not output_tensor:
            output_tensor.copy_(average)
        self.wire_bytes += all_to_all_bytes(messages.nbytes, size)
        self.plain_bytes += reduce_scatter_bytes(input_tensor.nbytes, size)

    def _scale(self, op: Any, size: int) -> float:
        """Return the factor that turns an average into the result of ``op``."""
        if op == dist.ReduceOp.SUM:
            return size
        factor = self._unit.gradient_divide_factor  # of PREMUL_SUM, which does not tell it
        assert factor is not None
        return size / factor
