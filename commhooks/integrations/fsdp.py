"""Models that ``fully_shard`` has sharded: hooks between replicas, few bits between shards.

The quantized reduce-scatter of gradients, between the ranks that a model is sharded over::

    messages = [encode(part) for part in flat.split(n / N)]    # part r: what rank r keeps
    received = all_to_all(messages)
    shard = mean([decode(message) for message in received])    # in float32

That is the first half of the two-shot all-reduce in algorithms/quantized/base.py: each number
is rounded once, and the mean is not. Nothing is remembered. Error feedback would need an error for
each parameter of the *whole* model on each rank, which is what sharding avoids.

The quantized all-gather of parameters, before forward and before backward::

    message = encode(large matrices of the shard) + bytes(its other parameters)
    whole = [decode(message) for message in all_gather(message)]    # also the rank's own

The shard does not change, so optimizers and checkpoints have the exact parameters. All ranks
compute with the same rounded ones. A message depends only on the shard, even with stochastic
rounding: until an optimizer steps, every gather returns the same bits.

With differences, after a first gather that is exact::

    message = encode(shard - last[rank])
    last = last + [decode(message) for message in all_gather(message)]    # the same on all ranks

Errors do not add up: each difference has what the ones before it have rounded.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from commhooks.adapters.dispatch import unwrap
from commhooks.adapters.fsdp import FSDPAdapter
from commhooks.adapters.fsdp_units import Unit, is_root, units_of
from commhooks.adapters.handle import AnyHook, HookHandle, register_with
from commhooks.adapters.handle import register as register_any
from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec
from commhooks.comm.agreement import check_agreement
from commhooks.comm.wire import all_gather_bytes, all_to_all_bytes, reduce_scatter_bytes
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
    ignored_params: Iterable[nn.Parameter] = (),
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

    A trained parameter that no unit manages, such as one that was added after ``fully_shard``, is
    not averaged, which a warning tells, except for ``ignored_params``: those of ``fully_shard``.
    Arguments and errors are otherwise those of :func:`commhooks.register`.
    """
    ignored = list(ignored_params)
    if replicate_group is None and not ignored:
        return register_any(model, hook, **options)

    def make_adapter(root: nn.Module) -> FSDPAdapter:
        return FSDPAdapter(root, replicate_group, ignored)

    return register_with(make_adapter, model, hook, options)


def quantize_reduce_scatter(
    model: nn.Module, numbers: str | Mapping[str, Any] = "int8", /, **options: Any
) -> "QuantizedCollective":
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
    return _quantize(model, _ReduceScatter, numbers, options)


def quantize_all_gather(
    model: nn.Module,
    numbers: str | Mapping[str, Any] = "int8",
    /,
    *,
    exact_below: int = 4096,
    differences: bool = False,
    **options: Any,
) -> "QuantizedCollective":
    """All-gather the parameters of a sharded model in few bits, from the next forward on.

    Forward and backward compute with rounded parameters, the same on all ranks. Optimizers,
    ``state_dict()`` and checkpoints have the exact ones. Collective, and together with what
    :func:`quantize_reduce_scatter` works with, itself included.

    If ``reshard_after_forward`` is a number of ranks, the numbers that these ranks gather before
    backward are those of forward, and are sent as they are. ``unshard(async_op=True)`` returns when
    the parameters have been received.

    Args:
        model: The root module, after ``fully_shard``.
        numbers: How numbers are sent, as in :func:`quantize_reduce_scatter`.
        exact_below: Parameters with fewer numbers are sent exactly, as are those of one dimension.
        differences: Send the differences from the parameters of the last gather, after a first
            exact one (the weight differences of SDP4Bit, `2410.15526
            <https://arxiv.org/abs/2410.15526>`__). Each rank keeps the last parameters, in the
            dtype that is gathered: as much memory as the whole model. Expects
            ``fully_shard(reshard_after_forward=False)``.
        **options: The options of that hook.

    Raises:
        CommHookError: As :func:`quantize_reduce_scatter`. Also in forward, and then it names the
            parameters, if those of a unit have several dtypes, gather other data
            (``fsdp_pre_all_gather``), or are resharded after forward and send differences.
        CommHookMismatchError: The ranks gave different arguments; on every rank.
    """
    settings = {"exact_below": exact_below, "differences": differences}
    return _quantize(model, _AllGather, numbers, options, **settings)


class QuantizedCollective:
    """A collective of a sharded model that is quantized, and what it has sent."""

    def __init__(self, units: Sequence["_Collective"]) -> None:
        self._units = units

    @property
    def wire_bytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return sum(unit.wire_bytes for unit in self._units)

    @property
    def plain_bytes(self) -> int:
        """The bytes that it would have sent in the dtype in which FSDP reduces or gathers."""
        return sum(unit.plain_bytes for unit in self._units)

    def remove(self) -> None:
        """Return to torch's collective. Call it between two steps, on every rank."""
        for unit in self._units:
            unit.remove()


def _quantize(
    model: nn.Module,
    kind: type["_Collective"],
    numbers: str | Mapping[str, Any],
    options: Mapping[str, Any],
    **settings: Any,
) -> QuantizedCollective:
    model, title = unwrap(model), kind.name.replace("_", "-")
    if not is_root(model):
        raise CommHookError(
            "expected the root module of a model that fully_shard has sharded, found "
            f"{type(model).__name__}"
        )
    units = [unit for unit in units_of(model) if unit.shards is not None]
    if any(isinstance(unit.collective(kind.name), kind) for unit in units):
        raise CommHookError(f"the {title} of the model is quantized already; remove() it")
    failure: Exception | None = None
    try:
        hook = create(numbers, **options)
        format_ = _Bfloat16() if hook.name == "bf16" else _Codes(_quantized(hook), units)
        identity = repr((hook.to_config(), settings))
    except Exception as error:
        failure, identity = error, repr(error)
    for group in {id(unit.shards): unit.shards for unit in units}.values():
        assert group is not None
        check_agreement(group, units[0].device, f"numbers of the {title}", identity)
    if failure is not None:
        raise failure
    return QuantizedCollective(
        [kind(unit, index, format_, **settings) for index, unit in enumerate(units)]
    )


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

    def decode(self, messages: Tensor, values: Tensor) -> None:
        """Write the numbers of all messages one after the other, in float32."""
        self._codec.assemble(messages, values, values.numel() // len(messages))


class _Bfloat16:
    """Numbers cast to bfloat16."""

    def encode(self, values: Tensor, size: int, seed: str) -> Tensor:  # noqa: ARG002
        return values.to(torch.bfloat16).view(size, -1).view(torch.uint8)

    def average(self, messages: Tensor, average: Tensor) -> None:
        numbers = messages.view(torch.bfloat16)
        torch.sum(numbers, 0, dtype=torch.float32, out=average).div_(messages.shape[0])

    def decode(self, messages: Tensor, values: Tensor) -> None:
        values.copy_(messages.view(torch.bfloat16).view(-1))


_Format: TypeAlias = _Codes | _Bfloat16


class _Collective:
    """A collective of one unit, in place of torch's. FSDP calls it on a stream of its own."""

    name: ClassVar[str]

    def __init__(self, unit: Unit, index: int, format_: _Format) -> None:
        self.wire_bytes = self.plain_bytes = 0
        self._unit = unit
        self._index = index
        self._format = format_
        self._torchs = unit.collective(self.name)
        unit.set_collective(self.name, self)

    def remove(self) -> None:
        """Return to torch's, if that has not happened yet."""
        if self._unit.collective(self.name) is self:
            self._unit.set_collective(self.name, self._torchs)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: Tensor = self._torchs.allocate(size, dtype=dtype, device=device)
        return memory


class _ReduceScatter(_Collective, ReduceScatter):
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
        input_tensor, output_tensor = _real(input_tensor), _real(output_tensor)
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


class _AllGather(_Collective, AllGather):
    name = "all_gather"

    def __init__(
        self, unit: Unit, index: int, format_: _Format, *, exact_below: int, differences: bool
    ) -> None:
        super().__init__(unit, index, format_)
        self._exact_below = exact_below
        self._differences = differences
        self._last: Tensor | None = None  # (ranks, numbers): what they got of large parameters

    def remove(self) -> None:
        super().remove()
        self._last = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        size, parameters = group.size(), self._unit.gathered()
        coded = [
            name
            for name, (shape, _) in parameters.items()
            if len(shape) > 1 and shape.numel() >= self._exact_below
        ]
        self.plain_bytes += all_gather_bytes(input_tensor.nbytes, size)
        # A smaller group has what forward left on its ranks: numbers that are rounded already.
        if group is not self._unit.shards or not coded:
            return self._gather(output_tensor, input_tensor, group, async_op)
        lengths = {name: length for name, (_, length) in parameters.items()}
        _check(input_tensor, lengths)
        if self._differences and self._unit.is_resharded_after_forward:
            raise CommHookError(
                "differences need fully_shard(reshard_after_forward=False): each rank keeps the "
                f"whole parameters anyway. Found {', '.join(lengths)}, resharded after forward"
            )
        shards, wholes = _real(input_tensor), _real(output_tensor).view(size, -1)
        reals = [shards.numel() // input_tensor.numel() * length for length in lengths.values()]
        shard_of = dict(zip(lengths, torch.split(shards, reals), strict=True))
        whole_of = dict(zip(lengths, torch.split(wholes, reals, 1), strict=True))
        exact = [name for name in lengths if name not in coded]

        if self._differences and self._last is None:
            self._gather(output_tensor, input_tensor, group)
            self._keep(torch.cat([whole_of[name] for name in coded], 1))
            return None
        numbers = torch.cat([shard_of[name] for name in coded]).float()
        if self._last is not None:
            numbers -= self._last[group.rank()]
        codes = self._format.encode(numbers, 1, seed="").view(-1)
        message = torch.cat([codes, *(shard_of[name].view(torch.uint8) for name in exact)])
        room = (size * message.numel(),)
        received = self.allocate(room, dtype=message.dtype, device=message.device)
        self._gather(received, message, group)
        received = received.view(size, -1)
        decoded = numbers.new_empty((size, numbers.numel()))
        self._format.decode(received[:, : codes.numel()].contiguous(), decoded.view(-1))
        if self._last is not None:
            decoded += self._last
            self._keep(decoded.to(self._last.dtype))
        _write(decoded, [whole_of[name] for name in coded])
        _write(received[:, codes.numel() :], [whole_of[name].view(torch.uint8) for name in exact])
        return None

    def _keep(self, parameters: Tensor) -> None:
        """Keep what all ranks got. From NaN and infinity, no difference would lead back."""
        self._last = parameters.nan_to_num(0.0, 0.0, 0.0)

    def _gather(
        self, received: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.wire_bytes += all_gather_bytes(sent.nbytes, group.size())
        with collective(group, "the all-gather of parameters"):
            work: dist.Work | None = self._torchs(received, sent, group, async_op)
            return work


def _check(flat: Tensor, lengths: Mapping[str, int]) -> None:
    """Raise CommHookError unless ``flat`` has the parameters, one after the other."""
    is_number = flat.is_floating_point() or flat.is_complex()
    if not is_number or flat.element_size() < 2 or flat.numel() != sum(lengths.values()):
        raise CommHookError(
            f"expected FSDP to gather {sum(lengths.values())} numbers of 16 bits or more for "
            f"{', '.join(lengths)}; found {flat.numel()} of {flat.dtype}. A unit whose parameters "
            "have several dtypes, or fsdp_pre_all_gather, cannot be quantized"
        )


def _write(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy the columns of ``source`` to the targets."""
    columns = torch.split(source, [target.shape[1] for target in targets], 1)
    for target, column in zip(targets, columns, strict=True):
        target.copy_(column)


def _quantized(hook: Any) -> BlockCodec:
    if not isinstance(hook, Quantized):
        raise CommHookError(
            f"expected a hook that quantizes, such as 'int8', 'int4' or 'fp8', or 'bf16'; found "
            f"{hook!r}, which belongs between replicas: commhooks.register()"
        )
    return hook.make_codec()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
