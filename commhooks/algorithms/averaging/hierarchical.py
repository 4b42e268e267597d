"""Plain averaging inside nodes, any hook between them.

    node 0: ranks 0 1 2 3        1. all-reduce inside each node
    node 1: ranks 4 5 6 7        2. the inner hook among the leaders, ranks 0 and 4
                                 3. broadcast by each leader to its node

In code, on a rank whose node has L ranks::

    def average(g):
        g = all_reduce(g, ranks=node) / L
        if is_leader:
            g = inner(g, ranks=leaders)
        return broadcast(g, root=leader, ranks=node)

Memory and links inside a node are fast, so the network between nodes has one rank per node to
serve: it carries 1/L of the bytes, and the inner hook compresses averages, whose errors are smaller
than those of the gradients themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, cast

import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.comm.nodes import check_nodes, ranks_of_node
from commhooks.comm.wire import all_reduce_bytes, broadcast_bytes
from commhooks.errors import CommHookOptionError
from commhooks.hook.base import CommHook, tree
from commhooks.hook.options import Ge
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from reducer import GradBucket

__all__ = ["Hierarchical"]


@register_hook("hierarchical")
@dataclass
class Hierarchical(CommHook):
    """Average exactly inside each node, and by the inner hook between nodes.

    The inner hook runs on the first rank of each node, and averages over these ranks. Its state,
    errors for example, is on them only. To correct its errors, put ``error_feedback`` inside.

    Wire, per bucket and step: one all-reduce of the gradients inside the node, and from the node's
    first rank what the inner hook sends between nodes and one broadcast of the gradients inside.

    Raises:
        CommHookOptionError: the inner hook changes parameters, which it would do on the first ranks
            only (``local_sgd`` has an option ``ranks_per_node`` for that), or it skips steps, as
            ``skip_nonfinite`` does, which only the first ranks would know.
    """

    inner: CommHook = "allreduce"  # type: ignore[assignment]  # becomes a hook
    """The hook that averages over nodes; by default exactly."""
    ranks_per_node: Annotated[int, Ge(0)] = 0
    """L; node i has the i-th L ranks. 0: the number that the launcher gives in LOCAL_WORLD_SIZE,
    which the option has once the hook is registered."""

    _is_first: bool = field(default=True, init=False, repr=False, compare=False)
    """Whether this rank is the first of its node, which sends the most."""

    lossless = True
    state_fields = no_state
    wire = "one all-reduce and one broadcast inside nodes, and what the inner hook sends between"
    needs = ("a launcher such as torchrun or `ranks_per_node`",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.changes_parameters:
            raise CommHookOptionError(
                f"option 'inner' of hook {self.name!r}: expected a hook that averages gradients; "
                f"{self.inner!r} also changes parameters, which it would do on one rank of each "
                "node only. For local_sgd, give its option ranks_per_node instead"
            )
        if any(hook.skips_steps for hook in tree(self.inner)):
            raise CommHookOptionError(
                f"option 'inner' of hook {self.name!r}: only one rank of each node would know "
                f"which steps {self.inner!r} skips, and models would differ. Put skip_nonfinite "
                "around hierarchical instead"
            )

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError unless the ranks can be divided into equal nodes."""
        self.ranks_per_node = check_nodes(self.ranks_per_node, group)
        self._is_first = group.rank() % self.ranks_per_node == 0
        nodes = _Nodes(group, self.ranks_per_node)
        self.inner.prepare(parameters, cast("dist.ProcessGroup", nodes))

    def nested_parameters(
        self, parameters: Mapping[str, Tensor]
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Return all parameters on the first rank of a node, where the inner hook runs."""
        return super().nested_parameters(parameters) if self._is_first else {}

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        node = comm.among(ranks_of_node(comm.rank, self.ranks_per_node))
        if node.size > 1:
            await node.all_reduce(buffer.div_(node.size))
        if node.rank == 0:
            leaders = comm.among(range(0, comm.size, node.size))
            average = await self.inner.reduce(bucket, leaders.within(self.inner))
            buffer.copy_(average.view(-1))
        if node.size > 1:
            await node.broadcast(buffer)
        return buffer

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        """Return the bytes of this rank; of the first rank of a node if it is not registered."""
        if self.ranks_per_node == 0:
            return None  # the launcher has not been asked yet
        nbytes = bucket.buffer().nbytes
        inside = all_reduce_bytes(nbytes, self.ranks_per_node)
        if not self._is_first:
            return inside
        between = self.inner.wire_bytes(bucket, size // self.ranks_per_node)
        if between is None:
            return None
        return inside + between + broadcast_bytes(nbytes, self.ranks_per_node, is_root=True)


class _Nodes:
    """The part of a process group that hooks use when they are registered, of nodes as ranks."""

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int) -> None:
        self._group = group
        self._ranks_per_node = ranks_per_node

    def rank(self) -> int:
        return self._group.rank() // self._ranks_per_node

    def size(self) -> int:
        return self._group.size() // self._ranks_per_node
