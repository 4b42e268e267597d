"""Runs a hook to its end on the thread that runs backward, where order is kept by the backend."""

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
    """A hook for a reducer, for backends that complete collectives in the order of issue.

    On NCCL waiting for a collective orders streams and returns at once. The hook has a stream of
    its own, so communication overlaps with backward all the same; and its collectives, on whatever
    communicators, come one after the other on the device, in one order on all ranks, so that they
    cannot wait for each other in a circle. With one rank nothing is issued. A CUDA graph can
    capture it. ``token`` as for ThreadedRunner.
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
        """Runs the hook on ``bucket``. Errors are CommHookErrors, set in the future."""
        if self._has_failed:
            self._has_failed = False
            self._hook.recover()
        execution = HookExecution(self._hook, bucket, self._group)
        future = execution.future
        self._stream.follow(self._stream.mark(), bucket.buffer())
        try:
            with self._stream, torch.no_grad():
                result = self._run(execution)
        except CommHookError as error:
            self._has_failed = True
            execution.fail(error)
            return future
        self.collector.record(execution.run())
        with self._stream:
            future.set_result(result)
        return future

    def abandon(self) -> None:
        """Nothing is ever on its way."""

    def close(self) -> None:
        """Gives up the subgroups."""
        self._subgroups.clear()

    def _run(self, execution: HookExecution) -> Tensor:
        while (result := execution.step()) is None:
            request, execution.pending = execution.pending, None
            assert request is not None
            if execution.comm.size == 1 or len(request.members) == 1 or request.is_vote:
                continue
            execution.count(request)
            try:
                request.start(self._among(request.members)).wait()
            except Exception as error:
                raise execution.refuse(error) from error
            execution.end_stage()
            execution.count_bytes(request)
        return result

    def _among(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The channel of these ranks, connected when it is first used; of all if empty.

        Not made by ``dist.new_group``, whose names depend on how many groups a rank has made.
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
            channel = type(self._backend)(
                PrefixStore(name, self._group.get_group_store()),
                ranks.index(self._group.rank()),
                len(ranks),
                self._backend.options,
            )
            # A backend only, but with a process group's methods for collectives.
            self._subgroups[ranks] = cast("dist.ProcessGroup", channel)
        return self._subgroups[ranks]
