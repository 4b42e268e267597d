"""Runs a hook to its end on the thread of backward; the backend keeps collectives in order."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commhooks.comm.exchange import NOT_BEGUN, Exchange, new_future
from commhooks.comm.stream_groups import StreamGroups
from commhooks.errors import CommHookError, CommHookPeerError
from commhooks.hook.base import CommHook, tree
from commhooks.hook.capabilities import any_declares, declares
from commhooks.runtime.execution import ExchangeExecution, HookExecution
from commhooks.runtime.side_stream import SideStream, record_on_current_stream
from commhooks.runtime.stats import StatsCollector
from reducer import GradBucket
from reducer.peers import is_peer_loss

__all__ = ["StreamRunner"]


class StreamRunner:
    """A :class:`~commhooks.runtime.runner.Runner` for backends that complete collectives in order.

    On NCCL, waiting for a collective orders streams and returns at once. The hook has a stream of
    its own, so communication still overlaps with backward. Its collectives, on whatever
    communicators, run one after the other on the device, in the same order on all ranks, so they
    cannot wait for each other in a circle. With one rank nothing is issued. A CUDA graph can
    capture it. Arguments are those of :class:`~commhooks.runtime.threaded_runner.ThreadedRunner`.

    A failure ends the hook on all ranks: Note [Failures on NCCL] in comm/stream_groups.py. Other
    backends than NCCL and Gloo have no such promise: their peers wait for the model's group.
    """

    def __init__(
        self, hook: CommHook, group: dist.ProcessGroup, device: torch.device, token: int
    ) -> None:
        self.collector = StatsCollector()
        self.name = hook.name
        self.checks_finite = declares(hook, "checks_finite")
        self._times_launches = any_declares(hook, "times_launches")
        self._hook = hook
        self._group = group
        self._groups = _groups(group, device, token)
        self._exchange_groups = _groups(group, device, token, purpose="exchanges")
        self._has_failed = False
        self._device = device
        self._stream = SideStream(device)
        self._exchange_stream = SideStream(device)
        self._handed_over: list[HookExecution] = []  # executions of this step, with exchanges
        self._begun: weakref.WeakSet[Exchange] = weakref.WeakSet()  # and not dropped

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Run the hook on ``bucket``. Errors are set in the future."""
        execution = HookExecution(self._hook, bucket, self._group)
        future = execution.future
        execution.launch(self._stream, timed=self._times_launches)
        self._stream.follow(execution.mark, bucket.buffer())
        try:
            with self._stream, self._mode():
                self._recover()
                result = self._run(execution, self._groups)
        except CommHookError as error:
            execution.close()
            self._fail(error)
            execution.fail(error)
            return future
        except BaseException as error:
            # Not of the hook: a signal has arrived on the thread of backward.
            self._fail(execution.error(f"{type(error).__name__}: {error}"))
            raise
        execution.record(self.collector)
        with self._stream:
            future.set_result(result)
        if execution.comm.begun:
            self._handed_over.append(execution)
        if bucket.is_last():
            self._run_exchanges()
        return future

    def connect(self, stages: Mapping[tuple[int, ...], int]) -> None:
        """Connect the process groups of these ranks; one stage suffices."""
        if self._groups is not None:
            self._groups.connect(dict.fromkeys(stages, 1))

    def end_step(self, index: int, step: int) -> Future[Tensor]:  # noqa: ARG002
        """Begin the exchanges of the step. A backend that keeps the order has no vote."""
        self._run_exchanges()
        future = new_future(torch.device("cpu"))
        future.set_result(torch.empty(0))
        return future

    def abandon(self) -> None:
        """Do nothing, because no bucket is ever on its way."""

    def flush(self) -> None:
        """Let the current stream wait for the hook, whose state is read or replaced next."""
        for stream in (self._stream, self._exchange_stream):
            stream.join()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let the caller work on the stream of the hook. Exchanges come before and after."""
        self.flush()
        with self._stream.forked():
            yield
        self._exchange_stream.follow(self._stream.end())
        with self._exchange_stream:
            for each in tree(self._hook):
                record_on_current_stream(each.state)

    def close(self) -> None:
        """Drop the hook's process groups."""
        for groups in (self._groups, self._exchange_groups):
            if groups is not None:
                groups.close()

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """Leave the modes of backward, whose thread has those of its caller."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            yield

    def _recover(self) -> None:
        """Begin anew after a step that failed, or raise its error."""
        for groups in (self._groups, self._exchange_groups):
            if groups is not None:
                groups.check()
        if self._has_failed:
            self._hook.recover()
            self._has_failed = False

    def _fail(self, error: CommHookError) -> None:
        self._has_failed = True
        self._handed_over.clear()
        self._begun.clear()
        for groups in (self._groups, self._exchange_groups):
            if groups is not None:
                groups.fail(error)

    def _run_exchanges(self) -> None:
        """Enqueue the exchanges of this step, whose results streams of later steps wait for."""
        handed_over, self._handed_over = self._handed_over, []
        self._exchange_stream.follow(self._stream.end())
        for execution in handed_over:
            for exchange in execution.comm.begun:
                self._begun.add(exchange)
                self._run_exchange(
                    ExchangeExecution(self._hook, exchange, execution.bucket, self._group)
                )

    def _run_exchange(self, execution: ExchangeExecution) -> None:
        try:
            with self._exchange_stream, self._mode():
                result = self._run(execution, self._exchange_groups)
                execution.future.set_result(result)
        except CommHookError as error:
            execution.close()
            execution.fail(error)
            return
        execution.record(self.collector)

    def _run(self, execution: HookExecution, groups: StreamGroups | None) -> Tensor:
        while (result := execution.step()) is None:
            if execution.exchange is not None:
                self._check_begun(execution, execution.exchange)
                continue
            collective, execution.pending = execution.pending, None
            assert collective is not None
            if execution.comm.size == 1 or len(collective.members) == 1 or collective.is_vote:
                continue
            execution.count(collective)
            try:
                collective.start(self._group_of(collective.members, groups)).wait()
            except Exception as error:
                if isinstance(error, CommHookPeerError) or is_peer_loss(error):
                    reason = groups.published() if groups is not None else None
                    raise execution.peer_error(reason, error) from error
                failure = execution.refuse(error)
                raise failure from failure.__cause__
            execution.end_stage()
            execution.count_bytes(collective)
        return result

    def _check_begun(self, execution: HookExecution, exchange: Exchange) -> None:
        """Raise CommHookError unless ``exchange`` has a result."""
        if exchange not in self._begun and not exchange.is_saved:
            raise execution.error(NOT_BEGUN)
        exchange.result()

    def _group_of(self, ranks: tuple[int, ...], groups: StreamGroups | None) -> dist.ProcessGroup:
        """Return the process group of these ranks, by default all."""
        if groups is not None:
            return groups.open(0, ranks)
        if ranks:
            raise CommHookError("collectives among some of the ranks need gloo or nccl")
        return self._group


def _groups(
    group: dist.ProcessGroup, device: torch.device, token: int, *, purpose: str = "steps"
) -> StreamGroups | None:
    backend = group._get_backend(device).name()  # noqa: SLF001
    if group.size() == 1 or backend not in ("gloo", "nccl"):
        return None
    return StreamGroups(group, token, device, purpose=purpose)
