"""Weights between the shards of a model: a quantized all-gather, before forward and backward.

::

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

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.adapters.fsdp.quantized import (
    Format,
    Numbers,
    QuantizedCollective,
    UnitCollective,
    quantize,
    real,
)
from commhooks.adapters.fsdp.units import Unit
from commhooks.comm.wire import all_gather_bytes
from commhooks.errors import CommHookError
from reducer.peers import collective


def quantize_all_gather(
    model: nn.Module,
    numbers: Numbers = "int8",
    /,
    *,
    exact_below: int = 4096,
    differences: bool = False,
    **options: Any,
) -> QuantizedCollective:
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
    return quantize(model, _AllGather, numbers, options, **settings)


class _AllGather(UnitCollective):
    name = "all_gather"

    def __init__(
        self, unit: Unit, index: int, format_: Format, *, exact_below: int, differences: bool
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
        size, parameters = group.size(), self._unit.gather_layout()
        is_coded = [
            len(shape) > 1 and shape.numel() >= self._exact_below
            for shape, _ in parameters.values()
        ]
        self.plain_bytes += all_gather_bytes(input_tensor.nbytes, size)
        # A smaller group has what forward left on its ranks: numbers that are rounded already.
        if group is not self._unit.shards or not any(is_coded):
            return self._gather(output_tensor, input_tensor, group, async_op)
        lengths = {name: length for name, (_, length) in parameters.items()}
        self._check(input_tensor, lengths)
        shards, wholes = real(input_tensor).view(1, -1), real(output_tensor).view(size, -1)
        reals = [shards.numel() // input_tensor.numel() * length for length in lengths.values()]
        coded, exact = _divide(shards, reals, is_coded)
        coded_wholes, exact_wholes = _divide(wholes, reals, is_coded)
        if self._differences and self._last is None:
            self._gather(output_tensor, input_tensor, group)
            self._keep(torch.cat(coded_wholes, 1))
            return None

        numbers = torch.cat(coded, 1).float()
        if self._last is not None:
            numbers -= self._last[group.rank()]
        codes = self._format.encode(numbers.view(-1), 1, seed="")
        message = torch.cat([codes, *exact], 1)
        received = self.allocate(
            (size * message.numel(),), dtype=message.dtype, device=message.device
        )
        self._gather(received, message.view(-1), group)
        received_codes, rest = received.view(size, -1).tensor_split([codes.numel()], 1)

        decoded = numbers.new_empty((size, numbers.numel()))
        self._format.decode(received_codes.contiguous(), decoded.view(-1))
        if self._last is not None:
            decoded += self._last
            self._keep(decoded.to(self._last.dtype))
        _write(decoded, coded_wholes)
        _write(rest, exact_wholes)
        return None

    def _check(self, flat: Tensor, lengths: Mapping[str, int]) -> None:
        """Raise CommHookError unless ``flat`` has the parameters, one after the other."""
        is_number = flat.is_floating_point() or flat.is_complex()
        if not is_number or flat.element_size() < 2 or flat.numel() != sum(lengths.values()):
            raise CommHookError(
                f"expected FSDP to gather {sum(lengths.values())} numbers of 16 bits or more for "
                f"{', '.join(lengths)}; found {flat.numel()} of {flat.dtype}. A unit whose "
                "parameters have several dtypes, or fsdp_pre_all_gather, cannot be quantized"
            )
        if self._differences and self._unit.is_resharded_after_forward:
            raise CommHookError(
                "differences need fully_shard(reshard_after_forward=False): each rank keeps the "
                f"whole parameters anyway. Found {', '.join(lengths)}, resharded after forward"
            )

    def _keep(self, parameters: Tensor) -> None:
        """Keep what all ranks got. From NaN and infinity, no difference would lead back."""
        self._last = parameters.nan_to_num(0.0, 0.0, 0.0)

    def _gather(
        self, received: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.wire_bytes += all_gather_bytes(sent.nbytes, group.size())
        with collective(group, "the all-gather of parameters"):
            work: dist.Work | None = self._original(received, sent, group, async_op)
            return work


def _divide(
    flat: Tensor, lengths: list[int], is_coded: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the columns of parameters that are sent coded, and the bytes of the others."""
    columns = list(zip(torch.split(flat, lengths, 1), is_coded, strict=True))
    coded = [each for each, is_one in columns if is_one]
    return coded, [each.view(torch.uint8) for each, is_one in columns if not is_one]


def _write(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy the columns of ``source`` to the targets."""
    columns = torch.split(source, [target.shape[1] for target in targets], 1)
    for target, column in zip(targets, columns, strict=True):
        target.copy_(column)
