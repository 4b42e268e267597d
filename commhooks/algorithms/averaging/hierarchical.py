"""Plain averaging inside nodes, any hook between them.

    node 0: ranks 0 1 2 3        1. each rank averages its shard of the gradients inside its node
    node 1: ranks 4 5 6 7        2. the inner hook on each shard, among ranks 0 4, 1 5, 2 6 and 3 7
                                 3. all-gather of the shards inside each node

In code, on a rank whose node has L ranks::

    def average(g):
        shard = mean(all_to_all(split(g, L), ranks=node))
        shard = inner(shard, ranks=those with the same local rank)
        return join(all_gather(shard, ranks=node))

Memory and links inside a node are fast. Between nodes, all ranks of a node send at the same time,
1/L of what a hook without nodes sends, and all of them encode. The inner hook compresses averages,
whose errors are smaller than those of the gradients themselves.

With ``sharded=False`` the first rank of each node, its leader, sends everything::

    def average(g):
        g = all_reduce(g, ranks=node) / L
        if is_leader:
            g = inner(g, ranks=leaders)
        return broadcast(g, root=leader, ranks=node)

Note [Shards in host memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If the ranks of a node share the memory of their buckets (Note [Host memory] in csrc/host), they
read the gradients and the shards of their peers where they are::

    def average(g):
        shard = mean(rows of my shard in the buckets of all ranks)    once all have packed theirs
        shard = inner(shard, ranks=those with the same local rank)
        copy the shards of all ranks to g                             once all shards are averages

A rank that shares its shard has read all buckets, so the others may overwrite theirs. It writes to
its shard again when all ranks have packed the bucket of the next step, after they have read it.

Note [Shards by rows]
~~~~~~~~~~~~~~~~~~~~~
Of each parameter, shard r has rows r·k to (r+1)·k. Rows are counted along the dimension that is
outermost in memory, so k of them are one piece of the buffer::

    buffer    a0 a1 a2 a3 a4 | b0 b1 | c0                  rows of parameters a, b and c
    shard 0   a0 a1 a2 | b0 | c0
    shard 1   a3 a4 0  | b1 | 0                            zeros make all shards equal

FSDP2 shards parameters in this way, so a hook works on the same shards on both. Equal parts of the
buffer would need no zeros. But when buckets are rebuilt, each part would have other parameters, and
the state of a hook would be on the wrong rank; and low-rank hooks would find no matrices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.bucket_memory import PerBucketCache
from commhooks.algorithms.bucket_parameters import gradient_of, parameters_of, real_view
from commhooks.codecs.finite import select
from commhooks.comm.communicator import Communicator
from commhooks.comm.host_memory import host_of, share, share_bytes
from commhooks.comm.nodes import check_nodes, ranks_of_node
from commhooks.comm.wire import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    broadcast_bytes,
)
from commhooks.hook.base import CommHook, is_lossless, refuse
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.options import Limits, hook_default
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from commhooks.precision import at_least_float32
from reducer import GradBucket
from reducer.native import HostGroup


@register_hook("hierarchical")
@dataclass
class Hierarchical(CommHook):
    """Average exactly inside each node, and by the inner hook between nodes.

    Each rank of a node averages a shard of the gradients, and the inner hook averages it over the
    ranks with the same number in other nodes. Each parameter is cut into blocks of rows, as FSDP2
    cuts it, which the inner hook gets instead of the parameter: :class:`BucketShards`. Its state is
    that of the shard. To correct its errors, put ``error_feedback`` inside.

    A bucket with a number that is not finite becomes NaN in all shards, unless the inner hook is
    lossless. So no shard's state changes in such a step.

    Wire, per bucket and step: inside the node an all-to-all and an all-gather of shards, and
    between nodes what the inner hook sends for a shard. With ``sharded=False``: inside the node an
    all-reduce of the gradients, and a broadcast from its first rank, which sends between nodes what
    the inner hook sends for all gradients.

    Metrics: ``in_host_memory``, 1 if nodes average in shared memory.

    Raises:
        CommHookOptionError: the inner hook changes parameters, but each rank has only a shard of
            them (``local_sgd`` has an option ``ranks_per_node`` for that), or it skips steps, as
            ``skip_nonfinite`` does, and ranks would skip different ones.
    """

    inner: CommHook = hook_default("allreduce")
    """The hook that averages over nodes; by default exactly."""
    ranks_per_node: Annotated[int, Limits(ge=0)] = 0
    """L; node i has the i-th L ranks. 0: the number that the launcher gives in LOCAL_WORLD_SIZE,
    which the option has once the hook is registered."""
    sharded: bool = True
    """Whether all ranks of a node send to other nodes, each a shard, or the first rank sends
    everything."""

    lossless = True
    spreads_parameters = True
    state_fields = no_state
    wire = "an all-to-all and an all-gather inside nodes, and what the inner hook sends for a shard"
    needs = ("a launcher such as torchrun or `ranks_per_node`",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._local_rank = 0  # in its node, whose first rank sends the most
        self._node: Sequence[int] = ()  # its ranks
        self._shards: PerBucketCache[BucketShards] = PerBucketCache(self)
        self._in_host_memory: PerBucketCache[Tensor] = PerBucketCache(self)  # shards
        reasons = {
            "changes_parameters": "also changes parameters, but no rank has all of them. For "
            "local_sgd, give its option ranks_per_node instead",
            "skips_steps": "skips steps, and would skip different ones on different ranks, because "
            "each sees other gradients. Put skip_nonfinite around hierarchical instead",
        }
        where = f"option 'inner' of hook {self.name!r}"
        refuse(where, self.inner, "a hook that averages gradients", reasons)

    @cached_property
    def checks_finite(self) -> bool:
        """Whether shards have to tell each other that numbers are not finite."""
        return self.sharded and not is_lossless(self.inner)

    def metrics(self) -> dict[str, float]:
        """Return whether nodes average in host memory, as 1 or 0."""
        return {"in_host_memory": float(bool(self._in_host_memory)), **super().metrics()}

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError unless the ranks can be divided into equal nodes."""
        self.ranks_per_node = per_node = check_nodes(self.ranks_per_node, group)
        self._local_rank = group.rank() % per_node
        self._node = ranks_of_node(group.rank(), per_node)
        self._in_host_memory.clear()  # the ranks may be others than before
        own = self.nested_parameters(parameters).get("inner", parameters)
        # A group without connections, whose ranks are the nodes.
        nodes = dist.ProcessGroup(group.rank() // per_node, group.size() // per_node)  # type: ignore[call-arg]
        self.inner.prepare(own, nodes)

    def nested_parameters(
        self, parameters: Mapping[str, Tensor]
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the shards of this rank; without shards, all on the first rank of a node."""
        if self._is_sharded:
            size = self.ranks_per_node
            return {
                "inner": {
                    name: shard_of(real_view(p).detach(), gradient_of(p), self._local_rank, size)
                    for name, p in parameters.items()
                }
            }
        return {"inner": parameters} if self._local_rank == 0 else {}

    def collectives(self, rank: int, size: int) -> dict[tuple[int, ...], int]:
        per_node = self.ranks_per_node
        node, peers = ranks_of_node(rank, per_node), range(rank % per_node, size, per_node)
        found: dict[tuple[int, ...], int] = {(): 1}
        if per_node > 1:
            found[tuple(node) if per_node < size else ()] = 2
        if self.sharded or rank == node[0]:
            inner = self.inner.collectives(rank // per_node, len(peers))
            everyone = tuple(peers) if per_node > 1 else ()
            for ranks, count in inner.items():
                found[tuple(peers[i] for i in ranks) or everyone] = count
        return found

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        node = comm.among(ranks_of_node(comm.rank, self.ranks_per_node))
        if node.size == 1:
            return await self.inner.reduce(bucket, comm.within(self.inner))
        if self.sharded:
            if host := host_of(bucket.buffer(), node.ranks):
                return await self._average_in_host_memory(bucket, comm, node, host)
            return await self._average_shards(bucket, comm, node)
        return await self._average_on_leaders(bucket, comm, node)

    async def _average_shards(
        self, bucket: GradBucket, comm: Communicator, node: Communicator
    ) -> Tensor:
        buffer, shards = bucket.buffer(), self._shards_of(bucket)
        parts = buffer.new_empty((node.size, shards.numel))
        shards.split(buffer, parts)
        if self.checks_finite:  # NaN tells the other shards
            parts = select(bucket.all_finite(), parts, torch.nan)
        received = await node.all_to_all(parts, with_own=False)
        mean = parts[node.rank].to(at_least_float32(buffer.dtype))
        for distance in range(1, node.size):
            mean.add_(received[(node.rank + distance) % node.size])
        mean = mean.div_(node.size).to(buffer.dtype)
        del received

        average = await self._average_between(bucket, comm, node, mean)
        gathered = await node.all_gather(average.view(-1))
        shards.join(gathered.unbind(), buffer)
        return buffer

    async def _average_in_host_memory(
        self, bucket: GradBucket, comm: Communicator, node: Communicator, host: HostGroup
    ) -> Tensor:
        """See Note [Shards in host memory]."""
        buffer, shards = bucket.buffer(), self._shards_of(bucket)
        shard = self._in_host_memory.get(bucket)
        if shard is None:
            shard = host.allocate(shards.numel, buffer.dtype)
            self._in_host_memory.put(bucket, shard)
        is_withheld = self.checks_finite and not bucket.all_finite()
        buffers = await share(buffer, node, host, is_withheld=is_withheld)
        if buffers is None:
            shard.fill_(torch.nan)
        else:
            shards.mean(buffers, node.rank, shard)

        average = await self._average_between(bucket, comm, node, shard)
        shard.copy_(average.view(-1))
        parts = await share(shard, node, host)
        assert parts is not None
        shards.join(parts, buffer)
        return buffer

    async def _average_between(
        self, bucket: GradBucket, comm: Communicator, node: Communicator, shard: Tensor
    ) -> Tensor:
        """Average the shard over the nodes."""
        peers = comm.among(range(node.rank, comm.size, node.size), parallel=node.size)
        own = self._shards_of(bucket).bucket(bucket, shard, node.rank)
        return await self.inner.reduce(own, peers.within(self.inner))

    async def _average_on_leaders(
        self, bucket: GradBucket, comm: Communicator, node: Communicator
    ) -> Tensor:
        buffer = bucket.buffer()
        await node.all_reduce(buffer.div_(node.size))
        if node.rank == 0:
            leaders = comm.among(range(0, comm.size, node.size))
            average = await self.inner.reduce(bucket, leaders.within(self.inner))
            buffer.copy_(average.view(-1))
        return await node.broadcast(buffer)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        """Return the bytes of this rank; of the first rank of a node if it is not registered."""
        per_node = self.ranks_per_node
        if per_node == 0:
            return None  # the launcher has not been asked yet
        own, nbytes = bucket, bucket.buffer().nbytes
        if self._is_sharded:
            shards = self._shards_of(bucket)
            own = shards.bucket(bucket, bucket.buffer().new_empty(shards.numel), self._local_rank)
            nbytes = own.buffer().nbytes
            if host_of(bucket.buffer(), self._node):
                inside = 2 * share_bytes(per_node)
            else:
                inside = all_to_all_bytes(per_node * nbytes, per_node)
                inside += all_gather_bytes(nbytes, per_node)
        else:
            inside = all_reduce_bytes(nbytes, per_node)
            if self._local_rank > 0:
                return inside
            inside += broadcast_bytes(nbytes, per_node, is_root=True)
        between = self.inner.wire_bytes(own, size // per_node)
        return None if between is None else inside + between

    @property
    def _is_sharded(self) -> bool:
        return self.sharded and self.ranks_per_node > 1

    def _shards_of(self, bucket: GradBucket) -> "BucketShards":
        shards = self._shards.get(bucket)
        return shards or self._shards.put(bucket, BucketShards(bucket, self.ranks_per_node))


class BucketShards:
    """Cuts the gradients of a bucket into ``size`` equal shards: Note [Shards by rows]."""

    def __init__(self, bucket: GradBucket, size: int) -> None:
        self.numel = 0
        """The number of elements of a shard."""
        self._size = size
        self._rows: list[list[tuple[slice, slice]]] = [[] for _ in range(size)]
        """For each rank, where the rows of each parameter are in its shard and in the gradients."""
        self._zeros: list[list[slice]] = [[] for _ in range(size)]
        """The start of the zeros that follow them in its shard."""
        for begin, gradient in zip(bucket.offsets, bucket.gradients(), strict=True):
            length = shard_of(gradient, gradient, 0, size).numel()
            place, self.numel = self.numel, self.numel + length
            for rank in range(size):
                rows = min(max(gradient.numel() - rank * length, 0), length)
                start = begin + rank * length
                self._rows[rank].append((slice(place, place + rows), slice(start, start + rows)))
                if rows < length:
                    self._zeros[rank].append(slice(place + rows, self.numel))

    def split(self, flat: Tensor, shards: Tensor) -> None:
        """Copy the gradients ``flat`` to ``shards``: (size, numel)."""
        for rank, shard in enumerate(shards):
            torch._foreach_copy_(*self._views(rank, shard, flat))
            self._fill(rank, shard)

    def join(self, shards: Sequence[Tensor], flat: Tensor) -> None:
        """Copy the shards of all ranks back to the gradients ``flat``."""
        for rank, shard in enumerate(shards):
            places, rows = self._views(rank, shard, flat)
            torch._foreach_copy_(rows, places)

    def mean(self, flats: Sequence[Tensor], rank: int, shard: Tensor) -> None:
        """Write the mean of ``rank``'s rows of ``flats`` to its shard."""
        for place, rows in self._rows[rank]:
            HostGroup.mean_of([flat[rows] for flat in flats], shard[place])
        self._fill(rank, shard)

    def bucket(self, whole: GradBucket, shard: Tensor, rank: int) -> GradBucket:
        """Return a bucket of the parameters' shards of ``rank``, whose gradients are ``shard``."""
        gradients = zip(parameters_of(whole), whole.gradients(), strict=True)
        parameters = [shard_of(p.detach(), gradient, rank, self._size) for p, gradient in gradients]
        return bucket_with(whole, shard, parameters=parameters)

    def _views(self, rank: int, shard: Tensor, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        rows = self._rows[rank]
        return [shard[place] for place, _ in rows], [flat[place] for _, place in rows]

    def _fill(self, rank: int, shard: Tensor) -> None:
        for place in self._zeros[rank]:
            shard[place].zero_()


def shard_of(parameter: Tensor, gradient: Tensor, rank: int, size: int) -> Tensor:
    """Return a view of ``parameter`` in the form of its shard on ``rank``.

    ``gradient`` has the layout of the parameter in a bucket. If the shard ends with zeros, the view
    begins at an earlier row, because the parameter has no rows for them. Its values then mean
    nothing.
    """
    if gradient.dim() == 0:
        return parameter.view(1)
    if gradient.numel() == 0:
        return parameter
    dim = _outermost(gradient.shape, gradient.stride())
    rows = gradient.shape[dim]
    length = -(-rows // size)
    return parameter.narrow(dim, min(rank * length, rows - length), length)


def _outermost(shape: torch.Size, strides: Sequence[int]) -> int:
    """Return the dimension whose rows are contiguous pieces of memory."""
    return max(range(len(shape)), key=lambda dim: (shape[dim] > 1, strides[dim], -dim))
