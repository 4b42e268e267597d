"""Collectives between shards that send quantized numbers: what gradients and weights share."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from commhooks.adapters.adapter import check_same
from commhooks.adapters.dispatch import unwrap
from commhooks.adapters.fsdp.units import Unit, is_root, units_of
from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.rounding import bits_of
from commhooks.errors import CommHookError
from commhooks.hook.registry import create
from commhooks.kernels import require

Numbers: TypeAlias = str | Mapping[str, Any]
"""How numbers are sent: the name of a hook that quantizes, a config, or "bf16"."""


class QuantizedCollective:
    """A collective of a sharded model that is quantized, and what it has sent."""

    def __init__(self, collectives: Sequence["UnitCollective"]) -> None:
        self._collectives = collectives

    @property
    def wire_bytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return sum(each.wire_bytes for each in self._collectives)

    @property
    def plain_bytes(self) -> int:
        """The bytes that it would have sent in the dtype in which FSDP reduces or gathers."""
        return sum(each.plain_bytes for each in self._collectives)

    def remove(self) -> None:
        """Return to torch's collective. Call it between two steps, on every rank."""
        for each in self._collectives:
            each.remove()


def quantize(
    model: nn.Module,
    kind: type["UnitCollective"],
    numbers: Numbers,
    options: Mapping[str, Any],
    **settings: Any,
) -> QuantizedCollective:
    """Let each sharded unit use a collective of this kind. Collective over the shard groups."""
    model = unwrap(model)
    if not is_root(model):
        raise CommHookError(
            "expected the root module of a model that fully_shard has sharded, found "
            f"{type(model).__name__}"
        )
    units = [unit for unit in units_of(model) if unit.shards is not None]
    title = kind.name.replace("_", "-")
    if not units:
        raise CommHookError(
            f"the model has no {title} to quantize, because its ranks are all replicas; for what "
            "these send, use commhooks.register()"
        )
    if any(isinstance(unit.collective(kind.name), kind) for unit in units):
        raise CommHookError(f"the {title} of the model is quantized already; remove() it")
    failure: Exception | None = None
    try:
        hook = create(numbers, **options)
        format_ = _format_of(hook, units)
        identity = repr((hook.to_config(), settings))
    except Exception as error:
        failure, identity = error, repr(error)
    try:
        for group in {id(unit.shards): unit.shards for unit in units}.values():
            assert group is not None
            check_same(group, units[0].device, f"numbers of the {title}", identity)
    except CommHookError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    return QuantizedCollective([kind(unit, i, format_, **settings) for i, unit in enumerate(units)])


class _Codes:
    """Numbers as the codes of a hook that quantizes."""

    def __init__(self, codec: BlockCodec) -> None:
        self._codec = codec

    def encode(self, values: Tensor, size: int, seed: str) -> Tensor:
        """Return a (size, bytes) tensor: the message for each rank."""
        length = values.numel() // size
        messages = values.new_empty((size, self._codec.encoded_bytes(length)), dtype=torch.uint8)
        self._codec.encode(values.float(), messages, length, seed=bits_of(seed))
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


Format: TypeAlias = _Codes | _Bfloat16


def _format_of(hook: Any, units: Sequence[Unit]) -> Format:
    if hook.name == "bf16":
        return _Bfloat16()
    if not isinstance(hook, Quantized):
        raise CommHookError(
            f"expected a hook that quantizes, such as 'int8', 'int4' or 'fp8', or 'bf16'; found "
            f"{hook!r}, which belongs between replicas: commhooks.register()"
        )
    for device in {unit.device for unit in units}:
        require(device)
    return _Codes(hook.make_codec())


class UnitCollective:
    """A collective of one unit, in place of torch's. FSDP calls it on a stream of its own.

    It has the methods of FSDP's ``AllGather`` or ``ReduceScatter``.
    """

    name: ClassVar[str]

    def __init__(self, unit: Unit, index: int, format_: Format) -> None:
        self.wire_bytes = self.plain_bytes = 0
        self._unit = unit
        self._index = index
        self._format = format_
        self._original = unit.collective(self.name)
        unit.set_collective(self.name, self)

    def remove(self) -> None:
        """Return to torch's, if that has not happened yet."""
        if self._unit.collective(self.name) is self:
            self._unit.set_collective(self.name, self._original)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: Tensor = self._original.allocate(size, dtype=dtype, device=device)
        return memory


def real(tensor: Tensor) -> Tensor:
    """Return a flat tensor of complex numbers as one of real numbers."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
