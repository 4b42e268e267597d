"""Local SGD: every rank trains by itself, and all average their parameters once per period.

Stich, ICLR 2019, https://arxiv.org/abs/1805.09767; after a start with plain averaging, post-local
SGD: Lin et al., ICLR 2020, https://arxiv.org/abs/1808.07217. One step with the parameters x and
gradients g of a rank, and the period H::

    def step(x, g, t):
        if t < start_step:
            g = all_reduce(g) / N                   # plain averaging
        elif (t - start_step) % H == 0:             # otherwise local; nodes may average g
            x = all_reduce(x) / N
        return x - u(g)                             # the optimizer's step

The papers average between two steps. Here the average comes between the gradients of a step and its
update, so that it travels while backward goes on: the first of every H updates uses gradients that
were computed before the average.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.averaging.without_consensus import WithoutConsensus
from commhooks.algorithms.bucket_parameters import parameters_of, pieces, store_if, unpack
from commhooks.codecs.finite import all_finite, select
from commhooks.comm.communicator import Communicator
from commhooks.comm.nodes import check_nodes, ranks_of_node
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from reducer import GradBucket


@dataclass
class LocalSteps(WithoutConsensus):
    """Base of hooks that average gradients before ``start_step``, and then at most inside nodes.

    Subclasses implement :meth:`synchronize`, :meth:`synchronization_bytes` and :meth:`sends`. Ranks
    may come and go between the steps in which they send. A joining rank receives another rank's
    parameters and :meth:`common_state`.
    """

    start_step: Annotated[int, Limits(ge=0)] = field(default=0, kw_only=True)
    """Average gradients in the steps before this one."""
    ranks_per_node: Annotated[int, Limits(ge=0)] = field(default=1, kw_only=True)
    """Average gradients among this many ranks in each local step. 0: the number of ranks per node
    that the launcher gives, which the option has once the hook is registered."""

    changes_parameters = True
    free_options = ("ranks_per_node",)  # on other nodes the state is the same

    def __post_init__(self) -> None:
        super().__post_init__()
        self._follows_commits = False
        # Parameters by name, with their values and states before steps that are not committed.
        self._before: dict[str, tuple[Tensor, Tensor, dict[str, Tensor] | None]] = {}

    def models_agree(self, step: int) -> bool:
        """Return whether all ranks have the same model before this step."""
        return step <= self.start_step

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError unless the ranks can be divided into equal nodes."""
        super().prepare(parameters, group)
        self.ranks_per_node = check_nodes(self.ranks_per_node, group)

    def collectives(self, rank: int, size: int) -> dict[tuple[int, ...], int]:
        found = {(): 1, **super().collectives(rank, size)}
        if 1 < self.ranks_per_node < size:
            found[tuple(ranks_of_node(rank, self.ranks_per_node))] = 1
        return found

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        if bucket.step < self.start_step:
            return await comm.all_reduce(buffer.div_(comm.size))
        finite = await self.synchronize(bucket, comm)
        if finite is not None:
            buffer = select(finite, buffer, torch.nan)
        if self.ranks_per_node > 1:
            node = comm.among(ranks_of_node(comm.rank, self.ranks_per_node))
            await node.all_reduce(buffer.div_(node.size))
        return buffer

    def sends(self, step: int) -> bool:
        """Return whether ranks send in this step, among members that must be known before it."""
        raise NotImplementedError

    def takes(self, step: int) -> bool:
        """Return whether results of an earlier step are used here; by default as it sends."""
        return self.sends(step)

    def common_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state that is the same on all ranks, by default all."""
        return self.state

    def follow_commits(self) -> None:
        """From now on, undo in :meth:`recover` what has changed since the last :meth:`commit`.

        Exchanges that are on their way are undone as well. Nested hooks recover as without this.
        Memory until a commit: the former values of what has changed.
        """
        self._follows_commits = True

    def commit(self) -> None:
        """Keep what steps have changed. Exchanges remain undoable until their results are taken."""
        self._before.clear()

    def recover(self) -> None:
        super().recover()
        with torch.no_grad():
            for name, (parameter, value, entry) in self._before.items():
                parameter.copy_(value)
                if entry is None:
                    self.state.pop(name, None)
                else:
                    self.state[name] = entry
        self._before.clear()

    def remember(self, parameters: Mapping[str, Tensor]) -> None:
        """Remember parameters and their states before they change, if commits are followed."""
        if self._follows_commits:
            for name, parameter in parameters.items():
                entry = self.state.get(name)
                kept = None if entry is None else {key: t.clone() for key, t in entry.items()}
                self._before[name] = parameter, parameter.clone(), kept

    async def synchronize(self, bucket: GradBucket, comm: Communicator) -> Tensor | None:
        """Send and change parameters of a bucket, in a step from ``start_step`` on.

        Return whether all received numbers were finite, () bool; None if none were to be received.
        """
        raise NotImplementedError

    def synchronization_bytes(self, bucket: GradBucket, size: int) -> int | None:
        """Return the bytes that :meth:`synchronize` sends."""
        raise NotImplementedError

    async def average(
        self, parameters: Mapping[str, Tensor], step: int, comm: Communicator
    ) -> Tensor:
        """Set parameters to their mean over the ranks, and return whether it is finite, () bool.

        If it is not, nothing changes, on any rank.
        """
        own = list(parameters.values())
        mean = await self.mean_of(own, step, comm)
        finite = all_finite(mean)
        self.remember(parameters)
        for means, some in pieces(unpack(mean, own), own):
            store_if(finite, means, some)
        return finite

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        gradient_bytes = bucket.buffer().nbytes
        if bucket.step < self.start_step:
            return all_reduce_bytes(gradient_bytes, size)
        if self.ranks_per_node == 0:
            return None  # the launcher has not been asked yet
        between = self.synchronization_bytes(bucket, size)
        if between is None:
            return None
        return all_reduce_bytes(gradient_bytes, self.ranks_per_node) + between


@register_hook("local_sgd")
@dataclass
class LocalSGD(LocalSteps):
    """Average parameters every ``period`` steps instead of gradients in each; models may differ.

    Between two averages every rank has another model, so save and load each rank's own. The default
    period trades accuracy for bytes, see docs/hooks/local_sgd.md. The hook ``diloco`` adds an outer
    optimizer, fragments, compression and delays.

    Wire: before ``start_step`` one all-reduce of the gradients per step, then nothing, except one
    all-reduce of the parameters per period, in float32 (float64 for float64 parameters); with
    ``ranks_per_node`` also one of the gradients among a node's ranks per step. Memory: none.

    If an average is not finite, no rank changes its parameters, and the gradients of the bucket
    become NaN on all ranks.
    """

    period: Annotated[int, Limits(ge=1)] = 8
    """H, steps from one average to the next. The longer it is, the more models differ."""

    wire = "nothing, except one all-reduce of the parameters in float32 per period"
    paper = "https://arxiv.org/abs/1805.09767"
    state_fields = no_state

    async def synchronize(self, bucket: GradBucket, comm: Communicator) -> Tensor | None:
        if not self._is_due(bucket.step):
            return None
        parameters = dict(zip(bucket.names, parameters_of(bucket), strict=True))
        return await self.average(parameters, bucket.step, comm)

    def sends(self, step: int) -> bool:
        return step < self.start_step or self._is_due(step)

    def synchronization_bytes(self, bucket: GradBucket, size: int) -> int:
        return self.mean_bytes(bucket, size) if self._is_due(bucket.step) else 0

    def _is_due(self, step: int) -> bool:
        return (step - self.start_step) % self.period == 0
