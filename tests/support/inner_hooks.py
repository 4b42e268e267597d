"""Hooks for tests of wrappers, which record the buckets that they get."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import commhooks


class Call(NamedTuple):
    """One bucket that the hook got."""

    step: int
    index: int
    is_last: bool
    names: list[str]
    dtype: torch.dtype


@commhooks.register_hook("test_recorder")
@dataclass
class Recorder(commhooks.CommHook):
    """Averages elements of at least ``threshold``; counts finite steps of each parameter."""

    threshold: float = 0.0
    tag: str = ""
    calls: list[Call] = field(default_factory=list, init=False, repr=False, compare=False)
    prepared: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    tells_contribution = True

    def prepare(self, parameters: Any, group: Any) -> None:
        self.prepared = list(parameters)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        buffer = bucket.buffer()
        self.calls.append(
            Call(bucket.step, bucket.index(), bucket.is_last(), bucket.names, buffer.dtype)
        )
        buffer[buffer.abs() < self.threshold] = 0
        if comm.wants_contribution:
            comm.contribution = buffer.clone()
        average = await comm.all_reduce(buffer.div_(comm.size))
        if average.isfinite().all():
            for name in bucket.names:
                self.state.setdefault(name, {"count": torch.zeros(())})["count"] += 1
        return average

    def counts(self) -> dict[str, float]:
        return {name: entry["count"].item() for name, entry in self.state.items()}
