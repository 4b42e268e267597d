"""Runners, which run a hook for a wrapped model, and the runner of each backend."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commhooks.hook.base import CommHook
from commhooks.runtime.stats import StatsCollector
from commhooks.runtime.stream_runner import StreamRunner
from commhooks.runtime.threaded_runner import ThreadedRunner
from reducer import GradBucket


class Runner(Protocol):
    """Runs one hook on bucket after bucket. The reducer can call it in place of a torch hook."""

    name: str
    """The hook's name, for error messages and profiles."""
    checks_finite: bool
    """Whether the reducer is to tell which buckets are finite: :meth:`GradBucket.all_finite`."""
    collector: StatsCollector
    """The costs of the executions."""

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Run the hook on ``bucket``; return a future of the average.

        Does not synchronize. A step begins with the bucket of index 0 and ends with the one that
        ``is_last()``, or with :meth:`end_step`. Errors are set in the future: CommHookErrors, or
        what the hook raised if that is no Exception, such as SystemExit.
        """

    def connect(self, stages: Mapping[tuple[int, ...], int]) -> None:
        """Connect what :meth:`CommHook.collectives` returned. Blocks until all ranks do so.

        Raises CommHookPeerError if a rank does not come within the timeout. Called before the
        first step.
        """

    def end_step(self, index: int, step: int) -> Future[Tensor]:
        """End a step after ``index`` buckets without a last one.

        Return a future, which completes when all ranks have finished all buckets, or gets the error
        that ended the step. Its value means nothing.
        """

    def abandon(self) -> None:
        """End the current step early: buckets on their way fail, on all ranks."""

    def flush(self) -> None:
        """Wait until the exchanges that have begun are over. Their errors show where they are used.

        Called between two steps. All ranks have begun the same exchanges, so they end without
        further calls. Raises CommHookError if a failure has ended the hook for good.
        """

    def between_steps(self) -> AbstractContextManager[None]:
        """Read or change what the hook keeps inside this context: Note [Streams and lifetimes].

        Flushes first. Tensors that leave it need :func:`record_on_current_stream` after it.
        """

    def close(self) -> None:
        """Release threads and connections. The runner is not used afterwards."""


def make_runner(
    hook: CommHook,
    group: dist.ProcessGroup,
    device: torch.device,
    token: int,
    collector: StatsCollector | None = None,
) -> Runner:
    """Return a runner for ``hook``, as the backend of ``group`` for ``device`` needs it.

    ``token`` is a number that is the same on all ranks and that no other runner uses. Collective:
    connects the stage groups that the hook is known to need. ``collector``: that of an earlier
    runner of the hook, to continue its statistics.
    """
    backend = group._get_backend(device).name()  # noqa: SLF001
    is_threaded = backend == "gloo" and group.size() > 1
    kind = ThreadedRunner if is_threaded else StreamRunner
    runner = kind(hook, group, device, token, collector)
    try:
        runner.connect(hook.collectives(group.rank(), group.size()))
    except BaseException:
        runner.close()
        raise
    return runner
