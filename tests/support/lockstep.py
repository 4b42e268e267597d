"""Runs one hook per rank inside this process, in lockstep: fast, and easy to inspect."""

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks import CommHook, GradBucket


class Collective:
    """An awaited collective. :func:`lockstep` receives it and sends back the result.

    ``combine`` computes this rank's result from the tensors of all ranks.
    """

    def __init__(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> None:
        self.tensor = tensor
        self.combine = combine

    def __await__(self) -> Generator["Collective", Tensor, Tensor]:
        return (yield self)


class LockstepCommunicator:
    """The part of a communicator that most hooks use. It keeps the tensors that were sent."""

    def __init__(self, rank: int, size: int, step: int) -> None:
        self.rank = rank
        self.size = size
        self.step = step
        self.generator = torch.Generator().manual_seed(step)
        self.wants_contribution = False
        self.contribution: Tensor | None = None
        self.sent: list[Tensor] = []

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Collective:
        assert op == "sum"
        self.sent.append(tensor.clone())
        return Collective(tensor, lambda tensors: tensor.copy_(torch.stack(tensors).sum(0)))

    def all_gather(self, tensor: Tensor) -> Collective:
        self.sent.append(tensor.clone())
        return Collective(tensor, torch.stack)

    def all_to_all(self, tensor: Tensor) -> Collective:
        self.sent.append(tensor.clone())
        rank, size = self.rank, self.size
        return Collective(tensor, lambda ts: torch.cat([t.chunk(size)[rank] for t in ts]))


def lockstep(
    hooks: Sequence[CommHook], buckets: Sequence[GradBucket], *, wants_contribution: bool = False
) -> tuple[list[Tensor], list[LockstepCommunicator]]:
    """Return the results of all ranks, and their communicators."""
    comms = [
        LockstepCommunicator(rank, len(hooks), bucket.step) for rank, bucket in enumerate(buckets)
    ]
    for comm in comms:
        comm.wants_contribution = wants_contribution
    runs: list[Coroutine[Any, Any, Tensor]] = [
        hook.reduce(bucket, comm)  # type: ignore[arg-type]
        for hook, bucket, comm in zip(hooks, buckets, comms, strict=True)
    ]
    answers: list[Any] = [None] * len(runs)
    while True:
        results: list[Tensor] = []
        collectives: list[Collective] = []
        for run, answer in zip(runs, answers, strict=True):
            try:
                collectives.append(run.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert not collectives, "some ranks finished while others sent another collective"
            return results, comms
        assert len({collective.tensor.numel() for collective in collectives}) == 1
        tensors = [collective.tensor.clone() for collective in collectives]
        answers = [collective.combine(tensors) for collective in collectives]


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
