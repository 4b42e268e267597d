"""Runs a hook to its end on the thread of backward; the backend keeps collectives in order."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.futures import Future

from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook
from commhooks.runtime.execution import HookExecution
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stats import StatsCollector
from reducer import GradBucket

__all__ = ["StreamRunner"]


class StreamRunner:
    """A :class:`~commhooks.runtime.runner.Runner` for backends that complete collectives in order.

    On NCCL, waiting for a collective orders streams and returns at once. The hook has a stream of
    its own, so communication still overlaps with backward. Its collectives, on whatever
    communicators, run one after the other on the device, in the same order on all ranks, so they
    cannot wait for each other in a circle. With one rank nothing is issued. A CUDA graph can
    capture it. Arguments are those of :class:`~commhooks.runtime.threaded_runner.ThreadedRunner`.
    """

    def __init__(
        self, hook: CommHook, group: dist.ProcessGroup, device: torch.device, token: int
    ) -> None:
        self.collector = StatsCollector()
        self.name = hook.name
        self.checks_finite = hook.checks_finite
        self._hook = hook
        self._group = group
        self._backend: Any = group._get_backend(device)  # noqa: SLF001
        self._token = token
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._has_failed = False
        self._stream = SideStream(device)

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Run the hook on ``bucket``. Errors are set in the future."""
        if self._has_failed:
            self._hook.recover()
            self._has_failed = False
        execution = HookExecution(self._hook, bucket, self._group)
        future = execution.future
        self._stream.follow(self._stream.mark(), bucket.buffer())
        try:
            with self._stream, torch.no_grad():
                result = self._run(execution)
        except BaseException as error:
            self._has_failed = True
            if not isinstance(error, CommHookError):
                raise  # not of the hook: a signal has arrived on the thread of backward
            execution.fail(error)
            return future
        self.collector.record(execution.run())
        with self._stream:
            future.set_result(result)
        return future

    def abandon(self) -> None:
        """Do nothing, because no bucket is ever on its way."""

    def close(self) -> None:
        """Drop the process groups of subgroups."""
        self._subgroups.clear()

    def _run(self, execution: HookExecution) -> Tensor:
        while (result := execution.step()) is None:
            collective, execution.pending = execution.pending, None
            assert collective is not None
            if execution.comm.size == 1 or len(collective.members) == 1 or collective.is_vote:
                continue
            execution.count(collective)
            try:
                collective.start(self._group_of(collective.members)).wait()
            except Exception as error:
                failure = execution.refuse(error)
                raise failure from failure.__cause__
            execution.end_stage()
            execution.count_bytes(collective)
        return result

    def _group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of these ranks, by default all; connect it on first use.

        ``dist.new_group`` is not used because its names depend on how many groups a rank has made.
        """
        if not ranks:
            return self._group
        if ranks not in self._subgroups:
            if self._backend.name() not in ("gloo", "nccl"):
                raise CommHookError(
                    "collectives among some of the ranks need gloo or nccl, found "
                    f"{self._backend.name()!r}"
                )
            name = f"commhooks/{self._token:x}/{ranks}"
            group = type(self._backend)(
                PrefixStore(name, self._group.get_group_store()),
                ranks.index(self._group.rank()),
                len(ranks),
                self._backend.options,
            )
            # Only a backend, but it has a process group's methods for collectives.
            self._subgroups[ranks] = cast("dist.ProcessGroup", group)
        return self._subgroups[ranks]
