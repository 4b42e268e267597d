"""Runs a comparison on the ranks that torchrun started, over the network between their hosts."""

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

__all__ = ["LaunchedRanks"]


class LaunchedRanks:
    """A context manager of this job's ranks. All of them run the same comparison.

    ``ranks(fn, ...)`` runs ``fn`` on this rank and returns the results of all ranks, so all come to
    the same decisions. If it raises on one rank, that process has to end; then the others fail as
    well, and torchrun ends all of them.
    """

    def __init__(self) -> None:
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self._results = dist.new_group(backend="gloo")

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results by rank. They are sent in a group of their own."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, fn(self.rank, *args, **kwargs), group=self._results)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._owns_group and error is None:  # after an error, peers may not answer
            dist.destroy_process_group()
