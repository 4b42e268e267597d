"""Gossip: each rank averages with one other rank per step.

Daily et al.: GossipGraD, 2018, https://arxiv.org/abs/1803.05880 averages gradients; Lian et al.:
D-PSGD, NeurIPS 2017, https://arxiv.org/abs/1705.09056 parameters. One step of rank i with its own
parameters x and gradients g::

    def step(x, g, t):
        target, source = partners(i, t)       # one permutation of the ranks per step
        if what == "gradients":               # x_i(t+1) = x_i(t) - u(Σ_j A_ij g_j(t))
            g = (g + sendrecv(g, send_to=target, receive_from=source)) / 2
        if average_every > 0 and t > 0 and t % average_every == 0:
            x = all_reduce(x) / N
        elif what == "parameters":            # x_i(t+1) = Σ_j A_ij x_j(t) - u(g_i(t))
            x = (x + sendrecv(x, send_to=target, receive_from=source)) / 2
        return x - u(g)                       # the optimizer's step

A = (I + P)/2 is the mixing matrix of step t, P its permutation (comm/topologies.py). Every row and
column of A sums to 1, so with plain SGD the mean of the models takes the same steps as if all
gradients were averaged. The models themselves differ: gradients that were averaged differently
drive them apart, and only mixed parameters bring them closer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.averaging.without_consensus import WithoutConsensus
from commhooks.algorithms.bucket_parameters import pack, parameters_of, store
from commhooks.comm.communicator import Communicator, PendingCollective
from commhooks.comm.topologies import Permutation, Push, Round, check_topology, round_at
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from reducer import GradBucket


class PeerToPeer(WithoutConsensus):
    """A hook with which each rank sends to one other rank per step, given by a topology.

    Subclasses declare its options ``topology`` and ``seed``.
    """

    topology: Push
    seed: int

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError if the topology cannot be built of the group's ranks."""
        super().prepare(parameters, group)
        check_topology(self.topology, group.size())

    def round_of(self, bucket: GradBucket, comm: Communicator) -> Round:
        """Return who sends to whom in the bucket's step."""
        return round_at(self.topology, comm.size, bucket.step, self.seed)


@register_hook("gossip")
@dataclass
class Gossip(PeerToPeer):
    """Average with one other rank per step, with another one each time; models may differ.

    Every rank gets another result, so save and load each rank's own model. Messages per rank and
    step do not grow with the number of ranks, and no rank waits for all others. Each optimizer sees
    the gradients of its own rank's data; docs/hooks/gossip.md says what that costs.

    Wire, per bucket and step: its gradients or parameters once, in their dtype, to one rank. In
    every ``average_every``-th step one all-reduce of the parameters, in float32 (float64 for
    float64 parameters): besides the gradients, or instead of the parameters themselves. A number
    that is not finite reaches the partner. The hook has no state; with one rank it changes nothing.
    """

    what: Literal["gradients", "parameters"] = "parameters"
    """The averaged tensors. Parameters: mixing brings models closer in each step. Gradients: only
    ``average_every`` does; without it models diverge as steadily as without communication."""
    topology: Permutation = "dissemination"
    """The pairs of ranks that exchange messages, see :mod:`commhooks.comm.topologies`."""
    average_every: Annotated[int, Limits(ge=0)] = 0
    """Average the parameters of all ranks in steps that are multiples of this; 0: never."""
    seed: int = 0
    """Seed of the partners of "dissemination" and "random". All ranks need the same."""

    state_fields = no_state
    wire = "the gradients or parameters once, to one rank"
    paper = "https://arxiv.org/abs/1803.05880"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        if comm.size == 1:
            return buffer
        if self.what == "gradients":
            # Halved first, so that sums of large half-precision numbers do not overflow.
            received = await self._sendrecv(buffer.div_(2), bucket, comm)
            buffer += received
        if self._averages_in(bucket.step):
            parameters = parameters_of(bucket)
            mean = await self.mean_of(parameters, bucket.step, comm)
            store(mean, parameters)
        elif self.what == "parameters":
            await self._mix_parameters(bucket, comm)
        return buffer

    def _averages_in(self, step: int) -> bool:
        return self.average_every > 0 and step > 0 and step % self.average_every == 0

    async def _mix_parameters(self, bucket: GradBucket, comm: Communicator) -> None:
        own = pack(parameters_of(bucket))
        difference = (await self._sendrecv(own, bucket, comm)).sub_(own)
        self.measure(bucket.step, [[difference]], ranks_if_partner=comm.size)
        store(own.add_(difference, alpha=0.5), parameters_of(bucket))

    def _sendrecv(
        self, tensor: Tensor, bucket: GradBucket, comm: Communicator
    ) -> PendingCollective:
        partners = self.round_of(bucket, comm)
        (source,) = partners.sources(comm.rank)
        return comm.sendrecv(tensor, send_to=partners.targets[comm.rank], receive_from=source)

    @property
    def changes_parameters(self) -> bool:
        return self.what == "parameters" or self.average_every > 0

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        if size == 1:
            return 0
        sent = bucket.buffer().nbytes if self.what == "gradients" else 0
        if self._averages_in(bucket.step):
            return sent + self.mean_bytes(bucket, size)
        return sent or sum(parameter.nbytes for parameter in parameters_of(bucket))
