"""Runs the coroutines of a hook, so that buckets overlap and all ranks agree on the order.

Note [All ranks or none]
~~~~~~~~~~~~~~~~~~~~~~~~
A step that fails on one rank fails on all, or models would drift apart in silence. After its last
bucket a step therefore ends with a vote: a barrier, which a rank enters when all its buckets have
finished. Its completion says that all have. A rank that fails, at whatever point,

    1. publishes why, in the store, under the current epoch;
    2. abandons its channels: connections close, and what peers have pending there fails, so that
       they do the same (a rank that issued fewest collectives on a channel has none pending that
       others lack, so it can close; then the others' fail);
    3. hands out errors when nothing of its own is pending, so that no buffer is in use afterwards;
    4. counts its epoch up by one. Since nobody gets past the vote, every rank does so in this very
       step, once, and the next step meets on new channels.

A step in which a hook has sent nothing is not voted on.
"""

import atexit
import itertools
import math
import os
import threading
import weakref
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commhooks.comm.communicator import PendingCollective
from commhooks.comm.issue_order import in_turn
from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookError, CommHookPeerError
from commhooks.hook.base import CommHook
from commhooks.runtime.execution import HookExecution
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stats import StatsCollector
from reducer import GradBucket
from reducer._C import CompletionQueue

__all__ = ["ThreadedRunner"]

_ARRIVED = -1  # token: something was put into `arrivals`


class ThreadedRunner:
    """A hook for a reducer: call it with a bucket, get a future of the average.

    For Gloo. A thread of its own runs all coroutines, so that launching a bucket costs backward
    nothing but a queue entry; it ends when the runner is dropped or closed. On CUDA tensors, which
    Gloo sends by way of the host, the thread has a stream of its own, too. ``token`` as for
    :class:`StageGroups`.
    """

    def __init__(
        self, hook: CommHook, group: dist.ProcessGroup, device: torch.device, token: int
    ) -> None:
        self.collector = StatsCollector()
        self.name = hook.name
        self.checks_finite = hook.checks_finite
        self._hook = hook
        self._group = group
        self._stream = SideStream(device)
        channels = StageGroups(group, token)
        self._loop = _Loop(hook, group.rank(), channels, self._stream, self.collector)
        # Not a reference to self: the thread must not keep the runner alive.
        self._finalizer = weakref.finalize(self, _stop, self._loop, os.getpid())
        self._finalizer.atexit = False

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Runs the hook on ``bucket``. Errors are CommHookErrors, set in the future."""
        execution = HookExecution(self._hook, bucket, self._group)
        execution.mark = self._stream.mark()
        future = execution.future
        self._loop.put(execution)
        return future

    def abandon(self) -> None:
        """The current step ends early: buckets on their way fail, on all ranks."""
        self._loop.put(None)

    def close(self) -> None:
        """Ends the thread."""
        self._finalizer()


class _Loop:
    """What the thread works on. Everything but ``put`` and ``stop`` runs on it."""

    def __init__(
        self,
        hook: CommHook,
        rank: int,
        channels: StageGroups,
        stream: SideStream,
        collector: StatsCollector,
    ) -> None:
        self._hook = hook
        self._rank = rank
        self._channels = channels
        self._stream = stream
        self._ledger = collector
        self._queue = CompletionQueue()
        self._arrivals: deque[HookExecution | None] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False

        self._tokens = itertools.count()
        self._pending: dict[int, HookExecution] = {}
        self._executions: list[HookExecution] = []  # unfinished, in bucket order
        # Of the current step:
        self._last_index = math.inf
        self._is_open = False  # from the first bucket until the last has finished
        self._has_sent = False
        self._failure: CommHookError | None = None

    # ---------------------------------------------------------------------- from other threads

    def put(self, arrival: HookExecution | None) -> None:
        """Hands over a execution, or None where the step ends early."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="commhooks", daemon=True)
            self._thread.start()
            _loops.add(self)
        self._arrivals.append(arrival)
        self._queue.put(_ARRIVED)

    def stop(self) -> None:
        self._stopped = True
        self._channels.close()
        self._queue.put(_ARRIVED)

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    # -------------------------------------------------------------------------- on the thread

    @torch.no_grad()
    def _main(self) -> None:
        with self._stream:
            self._work()
        self._channels.abandon()

    def _work(self) -> None:
        while not self._stopped:
            token = self._queue.get()
            try:
                if token == _ARRIVED:
                    if self._arrivals:
                        self._arrive(self._arrivals.popleft())
                elif token is not None:
                    self._complete(token)
            except Exception as error:
                # A bug of ours. Were this thread to end, all ranks would wait for ever.
                self._fail(self._error("the runner failed", error))

    def _arrive(self, execution: HookExecution | None) -> None:
        if execution is None:
            self._end_early()
            return
        if execution.bucket.index() <= self._last_index:
            self._begin_step()
        self._last_index = execution.bucket.index()
        if self._failure is not None:
            execution.close()
            execution.fail(self._failure)
            return
        self._is_open = True
        self._stream.follow(execution.mark, execution.bucket.buffer())
        self._executions.append(execution)
        self._advance(execution)
        self._give_turns()

    def _begin_step(self) -> None:
        self._has_sent = False
        if self._failure is None:
            return
        self._failure = None
        try:
            self._hook.recover()
        except Exception as error:
            self._fail(self._error(f"recover() of hook {self._hook!r} failed", error))

    def _end_early(self) -> None:
        """Without any bucket launched, peers do not wait for this rank either."""
        if self._is_open and self._failure is None:
            text = f"[rank {self._rank}] the backward pass ended before its last bucket"
            self._fail(CommHookError(text))
        self._is_open = False
        self._last_index = math.inf

    def _complete(self, token: int) -> None:
        execution = self._pending.pop(token)
        error = execution.end_collective()
        if self._failure is not None:
            self._finish_failed(execution)
            return
        if error is not None:
            self._fail(self._peer_error(execution, error))
            return
        self._advance(execution)
        self._give_turns()

    def _advance(self, execution: HookExecution) -> None:
        """Runs the hook to its next await, or to its end."""
        if self._failure is not None:
            return
        try:
            result = execution.step()
        except CommHookError as error:
            self._fail(error)
            return
        if result is None:
            return
        self._executions.remove(execution)
        if execution.bucket.is_last():
            self._is_open = False
        self._ledger.record(execution.run())
        execution.future.set_result(result)

    def _give_turns(self) -> None:
        """Issues what may be issued now; see Note [Order of collectives]."""
        for execution in in_turn(list(self._executions)):
            assert execution.pending is not None
            self._issue(execution, execution.pending)
            if self._failure is not None:
                return

    def _issue(self, execution: HookExecution, request: PendingCollective) -> None:
        execution.pending = None
        if request.is_vote and not self._has_sent:
            self._advance(execution)
            return
        self._has_sent = True
        stage = execution.count(request)
        if request.is_vote:
            stage = 0
        try:
            execution.work = request.start(self._channels.open(stage, request.members))
        except CommHookPeerError as error:
            self._fail(self._peer_error(execution, error.with_traceback(None)))
            return
        except Exception as error:
            self._fail(
                execution.refuse(error.with_traceback(None))
            )  # frames would keep the channel
            return
        token = next(self._tokens)
        self._pending[token] = execution
        self._queue.watch(execution.work, token, lane=stage)
        execution.count_bytes(request)

    # -------------------------------------------------------------------------------- failure

    def _fail(self, error: CommHookError) -> None:
        """See Note [All ranks or none]."""
        self._failure = error
        self._channels.publish(str(error))
        self._channels.abandon()
        for execution in list(self._executions):
            execution.close()
            if execution.work is None:
                self._finish_failed(execution)

    def _finish_failed(self, execution: HookExecution) -> None:
        assert self._failure is not None
        self._executions.remove(execution)
        execution.fail(self._failure)

    def _error(self, what: str, cause: Exception) -> CommHookError:
        error = CommHookError(f"[rank {self._rank}] {what}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def _peer_error(self, execution: HookExecution, error: Exception) -> CommHookError:
        """The failure of a collective: most likely not the fault of this rank."""
        failure: CommHookError
        if why := self._channels.published():
            failure = CommHookPeerError(f"[rank {self._rank}] another rank failed: {why}")
        else:
            failure = execution.error(
                f"{execution.operation} failed: a peer failed or left, or the network did "
                f"({error})",
                CommHookPeerError,
            )
        failure.__cause__ = error
        return failure


def _stop(loop: _Loop, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the object, but not its thread
        loop.stop()


_loops: weakref.WeakSet[_Loop] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # A thread that wakes up while the interpreter goes down would crash it.
    for loop in list(_loops):
        loop.stop()
    for loop in list(_loops):
        loop.join(2.0)
