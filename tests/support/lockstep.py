"""Simulated steps of one hook per rank, which keep what the ranks have sent."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks import CommHook, Communicator, GradBucket
from commhooks.comm.communicator import PendingCollective
from support.simulated_ranks import simulate


class RecordingCommunicator(Communicator):
    """Keeps in ``sent`` what this rank gives to its collectives, but not those of nested hooks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[Tensor] = []

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> PendingCollective:
        self.sent.append(tensor.clone())
        return super().all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor) -> PendingCollective:
        self.sent.append(tensor.clone())
        return super().all_gather(tensor)

    def all_to_all(self, tensor: Tensor, *, with_own: bool = True) -> PendingCollective:
        self.sent.append(tensor.clone())
        return super().all_to_all(tensor, with_own=with_own)


def lockstep(
    hooks: Sequence[CommHook], buckets: Sequence[GradBucket], *, wants_contribution: bool = False
) -> tuple[list[Tensor], list[RecordingCommunicator]]:
    """Return the results of all ranks, and their communicators."""
    return simulate(
        hooks, buckets, kind=RecordingCommunicator, wants_contribution=wants_contribution
    )


def make_bucket(gradients: dict[str, Tensor], step: int = 0) -> GradBucket:
    """Return a bucket of these gradients, each in its own memory layout."""
    tensors = list(gradients.values())
    buffer = torch.cat([_memory(tensor) for tensor in tensors])
    return GradBucket(buffer, tensors, list(gradients), step=step)


def draw_gradients(
    shapes: Mapping[str, Sequence[int]], rank: int, step: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return random gradients, which differ by rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def take_step(
    hooks: Sequence[CommHook], gradients: Sequence[dict[str, Tensor]], step: int
) -> list[Tensor]:
    """Return the results of all ranks for one bucket of these gradients."""
    return lockstep(hooks, [make_bucket(named, step) for named in gradients])[0]


def _memory(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in their order in memory."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.permute(order).reshape(-1)
