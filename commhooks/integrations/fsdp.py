"""Models that ``fully_shard`` has sharded: hooks between replicas, few bits between shards.

The quantized reduce-scatter between the ranks that a model is sharded over::

    messages = [encode(part) for part in flat.split(n / N)]    # part r: what rank r keeps
    received = all_to_all(messages)
    shard = mean([decode(message) for message in received])    # in float32

That is the first half of the two-shot all-reduce in algorithms/quantized/base.py: each number
is rounded once, and the mean is not. Nothing is remembered. Error feedback would need an error for
each parameter of the *whole* model on each rank, which is what sharding avoids.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from commhooks.adapters.dispatch import unwrap
from commhooks.adapters.fsdp import FSDPAdapter
from commhooks.adapters.fsdp_units import Unit, is_root, units_of
from commhooks.adapters.handle import AnyHook, HookHandle, register_with
from commhooks.adapters.handle import register as register_any
from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec
from commhooks.comm.agreement import check_agreement
from commhooks.comm.wire import all_to_all_bytes, reduce_scatter_bytes
from commhooks.errors import CommHookError
from commhooks.hook.registry import create
from commhooks.kernels import require
from reducer.peers import collective


def register(
    model: nn.Module,
    hook: AnyHook,
    /,
    *,
    replicate_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> HookHandle:
    """Let ``hook`` average the gradients of replicas of a sharded model. Collective.

    Without ``replicate_group``, the same as :func:`commhooks.register`, for a model that is sharded
    over a mesh of two dimensions. With it, ``model`` is sharded over meshes of one dimension, and
    the group has this rank and those with the same shards in the other replicas. FSDP then averages
    as if the model had been sharded over both: what ``set_requires_all_reduce`` and the other
    settings mean for HSDP, they mean here.

    ::

        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        handle = register(model, "int8", replicate_group=mesh.get_group("replicate"))

    Arguments and errors are otherwise those of :func:`commhooks.register`.
    """
    if replicate_group is None:
        return register_any(model, hook, **options)
    return register_with(lambda root: FSDPAdapter(root, replicate_group), model, hook, options)


def quantize_reduce_scatter(
    model: nn.Module, numbers: str | Mapping[str, Any] = "int8", /, **options: Any
) -> "QuantizedReduceScatter":
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
    model = unwrap(model)
    if not is_root(model):
        raise CommHookError(
            "expected the root module of a model that fully_shard has sharded, found "
            f"{type(model).__name__}"
        )
    units = [unit for unit in units_of(model) if unit.shards is not None]
    if any(isinstance(unit.reduce_scatter, _Encoded) for unit in units):
        raise CommHookError("the reduce-scatter of the model is quantized already; remove() it")
    failure: Exception | None = None
    try:
        hook = create(numbers, **options)
        format_ = _Bfloat16() if hook.name == "bf16" else _Codes(_quantized(hook), units)
        identity = repr(hook.to_config())
    except Exception as error:
        failure, identity = error, repr(error)
    for group in {id(unit.shards): unit.shards for unit in units}.values():
        assert group is not None
        check_agreement(group, units[0].device, "numbers of the reduce-scatter", identity)
    if failure is not None:
        raise failure
    return QuantizedReduceScatter(units, format_)


class QuantizedReduceScatter:
    """A quantized reduce-scatter, and what it has sent."""

    def __init__(self, units: Sequence[Unit], format_: "_Format") -> None:
        self._comms = [_Encoded(unit, index, format_) for index, unit in enumerate(units)]
        self._torchs = [(unit, unit.reduce_scatter) for unit in units]
        for unit, comm in zip(units, self._comms, strict=True):
            unit.reduce_scatter = comm

    @property
    def wire_bytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return sum(comm.wire_bytes for comm in self._comms)

    @property
    def plain_bytes(self) -> int:
        """The bytes that it would have sent in the dtype in which FSDP reduces."""
        return sum(comm.plain_bytes for comm in self._comms)

    def remove(self) -> None:
        """Return to torch's reduce-scatter. Call it between two steps, on every rank."""
        while self._torchs:
            unit, unit_comm = self._torchs.pop()
            unit.reduce_scatter = unit_comm


class _Codes:
    """Numbers as the codes of a hook that quantizes."""

    def __init__(self, codec: BlockCodec, units: Sequence[Unit]) -> None:
        for device in {unit.device for unit in units}:
            require(device)
        self._codec = codec

    def encode(self, values: Tensor, size: int, seed: str) -> Tensor:
        """Return a (size, bytes) tensor: the message for each rank."""
        length = values.numel() // size
        messages = values.new_empty((size, self._codec.encoded_bytes(length)), dtype=torch.uint8)
        number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little")
        self._codec.encode(values.float(), messages, length, seed=number)
        return messages

    def average(self, messages: Tensor, average: Tensor) -> None:
        """Write the mean of the decoded messages, in float32."""
        self._codec.average(messages, average, average.numel())


class _Bfloat16:
    """Numbers cast to bfloat16."""

    def encode(self, values: Tensor, size: int, seed: str) -> Tensor:  # noqa: ARG002
        return values.to(torch.bfloat16).view(size, -1).view(torch.uint8)

    def average(self, messages: Tensor, average: Tensor) -> None:
        numbers = messages.view(torch.bfloat16)
        torch.sum(numbers, 0, dtype=torch.float32, out=average).div_(messages.shape[0])


_Format: TypeAlias = _Codes | _Bfloat16


class _Encoded(ReduceScatter):
    """The reduce-scatter of one unit. FSDP calls it on its own stream, and ignores its result."""

    def __init__(self, unit: Unit, index: int, format_: _Format) -> None:
        self.wire_bytes = self.plain_bytes = 0
        self._unit = unit
        self._index = index
        self._format = format_
        self._calls = 0

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        size = group.size()
        if input_tensor.is_complex():
            input_tensor, output_tensor = (
                torch.view_as_real(tensor).view(-1) for tensor in (input_tensor, output_tensor)
            )
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


def _quantized(hook: Any) -> BlockCodec:
    if not isinstance(hook, Quantized):
        raise CommHookError(
            f"expected a hook that quantizes, such as 'int8', 'int4' or 'fp8', or 'bf16'; found "
            f"{hook!r}, which belongs between replicas: commhooks.register()"
        )
    return hook.make_codec()
