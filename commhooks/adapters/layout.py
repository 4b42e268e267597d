"""How the parameters of a model, and the state of its hook, are spread over the ranks.

Ranks are arranged as replicas times shards; without sharding there is one shard. A field of a
hook's state that has one number per element of a gradient is spread as the parameter. Each replica
has its own, so those of all replicas form one tensor (replicas, *parameter).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from commhooks.adapters.adapter import Adapter
from commhooks.comm.agreement import values_of_ranks

__all__ = ["Layout"]


class Layout:
    """The arrangement of the ranks. All of them construct it: a collective."""

    def __init__(self, adapter: Adapter) -> None:
        row = adapter.row
        self.replica, self.replicas = adapter.group.rank(), adapter.group.size()
        self.shard, self.shards = (0, 1) if row is None else (row.rank(), row.size())
        self._adapter = adapter
        kind = adapter.device.type
        self._column = DeviceMesh.from_group(adapter.group, kind)
        self._mesh = self._column
        if row is not None:
            ranks = dist.get_process_group_ranks(row)
            grid = values_of_ranks(ranks, adapter.group, adapter.device, "the layout of the ranks")
            self._mesh = DeviceMesh.from_group(
                [adapter.group, row],
                kind,
                torch.tensor(grid),
                mesh_dim_names=("replicate", "shard"),
            )

    @property
    def text(self) -> str:
        """The numbers of replicas and shards, as in "2x4"."""
        return f"{self.replicas}x{self.shards}"

    def whole(self, name: str, gradient: Tensor) -> tuple[torch.Size, int]:
        """Return the shape of a parameter, and the dimension that it is cut in."""
        return self._adapter.whole(name) or (gradient.shape, 0)

    def of_replicas(self, own: Tensor, name: str) -> DTensor:
        """Return (replicas, *parameter) of each replica's numbers, from this rank's shard."""
        shape, dim = self.whole(name, own)
        return self._spread(
            self.cut(own, shape, dim)[None], (self.replicas, *shape), self._own(dim)
        )

    def of_one(self, own: Tensor, name: str) -> Tensor:
        """Return (*parameter) of numbers that are the same in all replicas."""
        if self.shards == 1:
            return own
        shape, dim = self.whole(name, own)
        return self._spread(self.cut(own, shape, dim), shape, [Replicate(), Shard(dim)])

    def of_column(self, own: Tensor) -> DTensor:
        """Return (replicas, ...) of what the replicas of this shard have."""
        return DTensor.from_local(own[None].contiguous(), self._column, [Shard(0)], run_check=False)

    def target_of_replicas(self, size: torch.Size, dtype: torch.dtype, dim: int) -> Tensor:
        """Return an empty tensor to read what :meth:`of_replicas` returned here."""
        return empty_dtensor(*size, dtype=dtype, device_mesh=self._mesh, placements=self._own(dim))

    def target_of_one(self, size: torch.Size, dtype: torch.dtype, dim: int) -> Tensor:
        """Return an empty tensor to read what :meth:`of_one` returned on any ranks."""
        if self.shards == 1:
            return torch.empty(size, dtype=dtype, device=self._adapter.device)
        placements = [Replicate(), Shard(dim)]
        return empty_dtensor(*size, dtype=dtype, device_mesh=self._mesh, placements=placements)

    def target_of_column(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor to read what :meth:`of_column` returned here."""
        return empty_dtensor(*size, dtype=dtype, device_mesh=self._column, placements=[Shard(0)])

    def target_of_mean(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor to read all replicas' numbers for some rows of a parameter."""
        if len(size) == 1:
            return torch.empty(size, dtype=dtype, device=self._adapter.device)
        placements = [Shard(1)] * self._mesh.ndim
        return empty_dtensor(*size, dtype=dtype, device_mesh=self._mesh, placements=placements)

    def mean(self, of_replicas: Tensor) -> Tensor:
        """Return the mean over the replicas, whole, from what was read. Collective."""
        if not isinstance(of_replicas, DTensor):
            return of_replicas.mean(0)
        rows = of_replicas.to_local().mean(0)
        placements: list[Placement] = [Shard(0)] * self._mesh.ndim
        mean = self._spread(rows, of_replicas.shape[1:], placements)
        for i in reversed(range(self._mesh.ndim)):  # at once, torch warns that it is done by turns
            placements[i] = Replicate()
            mean = mean.redistribute(placements=placements)
        return mean.to_local()

    def cut(self, padded: Tensor, shape: torch.Size, dim: int) -> Tensor:
        """Return a shard without what was added to make all shards equal."""
        if self.shards == 1:
            return padded.contiguous()
        _, length = self._range(padded, shape, dim)
        return padded.narrow(dim, 0, length).contiguous()

    def own_part(self, whole: Tensor, gradient: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of ``whole``, as long as ``gradient``."""
        if self.shards == 1:
            return whole
        start, length = self._range(gradient, whole.shape, dim)
        return self.pad(whole.narrow(dim, start, length), gradient, dim)

    def pad(self, shard: Tensor, gradient: Tensor, dim: int) -> Tensor:
        """Return the shard with zeros at its end, so that it is as long as ``gradient``."""
        if self.shards == 1:
            return shard
        padded = shard.new_zeros(gradient.shape)
        padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        return padded

    def _range(self, gradient: Tensor, shape: torch.Size, dim: int) -> tuple[int, int]:
        """Return where this rank's shard begins in the parameter, and its length."""
        start = min(self.shard * gradient.shape[dim], shape[dim])
        return start, min(gradient.shape[dim], shape[dim] - start)

    def _own(self, dim: int) -> list[Placement]:
        placements: list[Placement] = [Shard(0), Shard(1 + dim)]
        return placements[: self._mesh.ndim]

    def _spread(
        self, local: Tensor, shape: Sequence[int], placements: Sequence[Placement]
    ) -> DTensor:
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
