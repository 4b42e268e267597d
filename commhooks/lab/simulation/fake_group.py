"""A fake process group of any size, in one process: all its ranks hold the same tensors.

Only rank 0 exists. What a collective returns to rank 0 follows from what rank 0 passes in, so a
hook can run to its end among N ranks, and its decoders receive messages that they understand.
Nothing is sent.

Rank 0 does at least as much as any other rank: in every topology of :mod:`commhooks.algorithms` the
first rank of a node leads the node, or all of its ranks do the same.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

__all__ = ["FakeGroup", "FakeStageGroup"]


class FakeGroup:
    """The methods that hooks and communicators call on the model's process group."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


class FakeStageGroup(FakeGroup):
    """Executes one collective among ``size`` equal ranks, and keeps the bytes that a rank passed.

    The methods are those of a process group that :class:`commhooks.Communicator` calls.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.tensor_bytes = 0

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        (tensor,) = tensors
        self.tensor_bytes = tensor.nbytes
        if options.reduceOp == ReduceOp.SUM:
            tensor.mul_(self._size)
        elif options.reduceOp == ReduceOp.PRODUCT:
            tensor.pow_(self._size)

    def _allgather_base(self, gathered: Tensor, own: Tensor) -> None:
        self.tensor_bytes = own.nbytes
        gathered.view(self._size, -1).copy_(own.view(1, -1).expand(self._size, -1))

    def alltoall_base(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],  # noqa: ARG002
    ) -> None:
        """Receive the parts for rank 0; with sizes, receive whole tensors from some ranks."""
        self.tensor_bytes = sent.nbytes
        part = sent.view(-1) if received_sizes else sent.view(self._size, -1)[0]
        if received.numel() > 0:
            rows = received.view(-1, part.numel())
            rows.copy_(part.expand_as(rows))

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, options: Any) -> None:  # noqa: ARG002
        self.tensor_bytes = whole.nbytes
        part.copy_(whole.chunk(self._size)[0]).mul_(self._size)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> None:  # noqa: ARG002
        self.tensor_bytes = tensors[0].nbytes
