"""Local SGD: every rank trains by itself, and all average their parameters once per period.

Stich, ICLR 2019, https://arxiv.org/abs/1805.09767; after a start with plain averaging, post-local
SGD: Lin et al., ICLR 2020, https://arxiv.org/abs/1808.07217; with an outer optimizer, DiLoCo:
Douillard et al., 2023, https://arxiv.org/abs/2311.08105; by fragments, Streaming DiLoCo, 2025,
https://arxiv.org/abs/2501.18512. One step with the parameters x and gradients g of a rank, the
anchor a and the momentum v of the outer optimizer, and the period H::

    def step(x, g, a, v, t):
        if t < start_step:
            g = all_reduce(g) / N                   # plain averaging
        elif (t - start_step) % H == 0:             # otherwise local; nodes may average g
            x = all_reduce(x) / N
            if outer == "nesterov":                 # else "none"
                d = a - x                           # how far the inner steps moved the anchor
                v = μ * v + d
                x = a = a - η * (d + μ * v)
        return x - u(g), a, v                       # the optimizer's step

The first average becomes the anchor, with v = 0. The papers average between two steps. Here the
average comes between the gradients of a step and its update, so that it travels while backward goes
on: the first of every H updates uses gradients that were computed before the average.

Fragments: the parameters, in the model's order, are divided into F runs of about equal size, and
run f is averaged in steps t with t - start_step = ⌊f·H/F⌋ modulo H. So each step sends at most
about 1/F of the model, and each parameter still travels once per period.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.averaging.without_consensus import WithoutConsensus
from commhooks.algorithms.bucket_parameters import pack, parameters_of, store
from commhooks.comm.communicator import Communicator
from commhooks.comm.nodes import check_nodes, ranks_of_node
from commhooks.comm.wire import all_reduce_bytes
from commhooks.errors import CommHookError
from commhooks.hook.options import Ge, Gt, Lt
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["LocalSGD"]


@register_hook("local_sgd")
@dataclass
class LocalSGD(WithoutConsensus):
    """Average parameters every ``period`` steps instead of gradients in each; models may differ.

    Between two averages every rank has another model, so save and load each rank's own. For DiLoCo
    use ``period=500, outer="nesterov"``, with AdamW as the optimizer. The default period trades
    accuracy for bytes, see docs/hooks/local_sgd.md.

    Wire: before ``start_step`` one all-reduce of the gradients per step, then nothing, except one
    all-reduce of the parameters per period, in float32 (float64 for float64 parameters), of each
    fragment in its turn; with ``ranks_per_node`` also one of the gradients among a node's ranks per
    step. Memory, with an outer optimizer: two numbers per parameter element, in the same dtype.

    If an average is not finite, no rank changes its parameters or state, and the gradients of the
    bucket become NaN on all ranks. After a failed step, and at the end of ``join``, the outer
    optimizer starts from the beginning.
    """

    period: Annotated[int, Ge(1)] = 8
    """H, steps from one average to the next. The longer it is, the more models differ."""
    start_step: Annotated[int, Ge(0)] = 0
    """Average gradients in the steps before this one."""
    outer: Literal["none", "nesterov"] = "none"
    """Averages become the new parameters, or the input of SGD with Nesterov momentum."""
    outer_lr: Annotated[float, Gt(0), Lt(math.inf)] = 0.7
    """η. At 1, without momentum, "nesterov" does the same as "none"."""
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """μ"""
    fragments: Annotated[int, Ge(1)] = 1
    """F, parts of the model that are averaged in different steps."""
    ranks_per_node: Annotated[int, Ge(0)] = 1
    """Average gradients among this many ranks in each local step. 0: the number of ranks per node
    that the launcher gives, which the option has once the hook is registered."""

    _fragment_of: dict[str, int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    wire = "nothing, except one all-reduce of the parameters in float32 per period"
    paper = "https://arxiv.org/abs/1805.09767"

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError for unequal nodes, and for more fragments than parameters."""
        super().prepare(parameters, group)
        self.ranks_per_node = check_nodes(self.ranks_per_node, group)
        if self.fragments > len(parameters):
            raise CommHookError(
                f"expected at most as many fragments as parameters, {len(parameters)}, found "
                f"fragments={self.fragments}"
            )
        runs = runs_of([parameter.numel() for parameter in parameters.values()], self.fragments)
        self._fragment_of = dict(zip(parameters, runs, strict=True))

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        if self.outer == "none":
            return ()
        return [StateField.like(gradient, name, "same") for name in ("anchor", "momentum")]

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        if bucket.step < self.start_step:
            return await comm.all_reduce(buffer.div_(comm.size))
        if self.ranks_per_node > 1:
            node = comm.among(ranks_of_node(comm.rank, self.ranks_per_node))
            await node.all_reduce(buffer.div_(node.size))
        due = self._due(bucket)
        if due and not await self._average(due, bucket.step, comm):
            buffer.fill_(torch.nan)
        return buffer

    def _due(self, bucket: GradBucket) -> dict[str, Tensor]:
        """Return the parameters that are averaged in this step."""
        turn = (bucket.step - self.start_step) % self.period
        return {
            name: parameter
            for name, parameter in zip(bucket.names, parameters_of(bucket), strict=True)
            if turn == self._fragment_of.get(name, 0) * self.period // self.fragments
        }

    async def _average(self, due: Mapping[str, Tensor], step: int, comm: Communicator) -> bool:
        """Return whether the average was finite; it is the same on all ranks."""
        parameters = list(due.values())
        own = pack(parameters)
        own = own.to(at_least_float32(own.dtype))
        mean = await comm.all_reduce(own / comm.size)
        if not mean.isfinite().all():
            return False
        self.measure(step, own.sub_(mean))
        if self.outer == "nesterov":
            parts = torch.split(mean, [parameter.numel() for parameter in parameters])
            for name, part in zip(due, parts, strict=True):
                self._outer_step(name, part.view(due[name].shape))
        store(mean, parameters)
        return True

    def _outer_step(self, name: str, mean: Tensor) -> None:
        """Replace ``mean`` by the new anchor."""
        if name not in self.state:
            self.state[name] = {"anchor": mean.clone(), "momentum": torch.zeros_like(mean)}
            return
        # A loaded state may be on another device.
        entry = {key: tensor.to(mean.device) for key, tensor in self.state[name].items()}
        self.state[name] = entry
        anchor, momentum = entry["anchor"], entry["momentum"]
        outer_gradient = anchor - mean
        momentum.mul_(self.outer_momentum).add_(outer_gradient)
        anchor.sub_(outer_gradient.add_(momentum, alpha=self.outer_momentum), alpha=self.outer_lr)
        mean.copy_(anchor)

    @property
    def changes_parameters(self) -> bool:
        return True

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        gradient_bytes = bucket.buffer().nbytes
        if bucket.step < self.start_step:
            return all_reduce_bytes(gradient_bytes, size)
        if self.ranks_per_node == 0:
            return None  # the launcher has not been asked yet
        averaged_bytes = sum(
            parameter.numel() * at_least_float32(parameter.dtype).itemsize
            for parameter in self._due(bucket).values()
        )
        in_node = all_reduce_bytes(gradient_bytes, self.ranks_per_node)
        return in_node + all_reduce_bytes(averaged_bytes, size)

    def recover(self) -> None:
        """Forget the anchors, which may have moved on some ranks only: the next average is one."""
        self.state = {}


def runs_of(sizes: Sequence[int], count: int) -> list[int]:
    """Divide items into runs of about equal size; return the run, 0 to count - 1, of each item.

    An item is in the run that contains its middle.
    """
    total = max(sum(sizes), 1)
    starts = itertools.accumulate(sizes, initial=0)
    return [
        min(count * (2 * start + size) // (2 * total), count - 1)
        for start, size in zip(starts, sizes, strict=False)
    ]
