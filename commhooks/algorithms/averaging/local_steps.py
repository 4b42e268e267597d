"""The base of hooks under which ranks train by themselves, and exchange models now and then."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.averaging.without_consensus import WithoutConsensus
from commhooks.algorithms.bucket_parameters import pack, store
from commhooks.comm.communicator import Communicator
from commhooks.comm.nodes import check_nodes, ranks_of_node
from commhooks.comm.wire import all_reduce_bytes
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["LocalSteps"]


class LocalSteps(WithoutConsensus):
    """Averages gradients before ``start_step``, and then at most among the ranks of a node.

    Subclasses declare the options ``period``, ``start_step`` and ``ranks_per_node``, and say in
    :meth:`synchronize` what ranks do about their models.
    """

    period: int
    start_step: int
    ranks_per_node: int

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
        if not await self.synchronize(bucket, comm):
            buffer.fill_(torch.nan)
        if self.ranks_per_node > 1:
            node = comm.among(ranks_of_node(comm.rank, self.ranks_per_node))
            await node.all_reduce(buffer.div_(node.size))
        return buffer

    async def synchronize(self, bucket: GradBucket, comm: Communicator) -> bool:
        """Send and change parameters of a bucket, in a step from ``start_step`` on.

        Return whether all that was received and used was finite.
        """
        raise NotImplementedError

    def synchronization_bytes(self, bucket: GradBucket, size: int) -> int | None:
        """Return the bytes that :meth:`synchronize` sends."""
        raise NotImplementedError

    async def average(self, parameters: Sequence[Tensor], step: int, comm: Communicator) -> bool:
        """Set parameters to their mean over the ranks, and return whether it is finite.

        If it is not, nothing changes, on any rank.
        """
        own = pack(parameters)
        own = own.to(at_least_float32(own.dtype))
        mean = await comm.all_reduce(own / comm.size)
        if not mean.isfinite().all():
            return False
        self.measure(step, own.sub_(mean))
        store(mean, parameters)
        return True

    @property
    def changes_parameters(self) -> bool:
        return True

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
