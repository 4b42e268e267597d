"""Runs a comparison on the ranks that torchrun started, over the network between their hosts."""

import os
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from commhooks.cluster.call import CallResult
from commhooks.errors import CommHookError, CommHookPeerError, reason_of

__all__ = ["LaunchedRanks"]


_PATIENCE = timedelta(hours=2)
"""A rank that has failed waits here for peers, which wait for it until their own time-out."""


class LaunchedRanks:
    """A context manager of this job's ranks. All of them run the same comparison.

    ``ranks(fn, ...)`` runs ``fn`` on this rank and returns the results of all ranks, so all come to
    the same decisions. If it raises on one rank, all of them raise that rank's error. If a process
    dies, torchrun ends all of them.
    """

    def __init__(self) -> None:
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self._results = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results by rank. They are sent in a group of their own."""
        try:
            own = CallResult(fn(self.rank, *args, **kwargs))
        except Exception as error:
            own = CallResult.of_failure(error)
        found: list[CallResult] = [own] * self.world_size
        dist.all_gather_object(found, own, group=self._results)
        errors = [
            result.exception(rank, self.world_size)
            for rank, result in enumerate(found)
            if result.error_text is not None
        ]
        if errors:  # raise the first one that is not about another rank's
            raise min(errors, key=lambda each: isinstance(each, CommHookPeerError))
        return [result.value for result in found]

    def restart(self) -> None:
        """Check that the ranks still answer each other: they are processes of torchrun."""
        try:
            dist.barrier()
        except RuntimeError as error:
            raise CommHookError(
                "the ranks cannot go on after an error, because they do not answer each other any "
                f"more; compare without the hook that failed last: {reason_of(error)}"
            ) from error

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
