"""Runs a hook to its end on the thread of backward; the backend keeps collectives in order."""

import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commhooks.comm.exchange import NOT_BEGUN, Exchange, completed, new_future
from commhooks.comm.private_groups import PrivateGroups
from commhooks.errors import CommHookError, CommHookPeerError
from commhooks.hook.base import tree
from commhooks.runtime import replays
from commhooks.runtime.execution import ExchangeExecution, HookExecution
from commhooks.runtime.replays import Replay, Replays
from commhooks.runtime.runner import Runner
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.step_scheduler import Phase, StepState
from reducer import GradBucket
from reducer.backends import NCCL, family_of
from reducer.peers import is_peer_loss

SENDS_ALONE = False
"""Whether collectives of one rank are issued. For tests on one device, which has one rank."""


class StreamRunner(Runner):
    """Runs hooks on backends that complete collectives in order.

    On NCCL, waiting for a collective orders streams and returns at once. The hook has a stream of
    its own, so communication still overlaps with backward. With one rank nothing is issued.

    Note [Order on the model's group]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Collectives of all ranks within a step go through the model's process group, whose communicator
    exists already. NCCL needs them in the same order on all ranks. They are issued on the thread of
    backward, one bucket to its end after the other, between those of the wrapper: the broadcast of
    buffers comes before them, the map of used parameters after them. Several models share a group
    as they do without hooks: their buckets come in the order in which backward completes them.

    What cannot go there has communicators of its own, in comm/private_groups.py. Those that the
    hook is known to need are connected when it is registered. Kernels of two communicators may wait
    for their peers at the same time, so the device must have room for both. Within a step of one
    model this never happens, because they are enqueued on one stream.

    Note [Failures on NCCL]
    ~~~~~~~~~~~~~~~~~~~~~~~
    The host does not wait for collectives of NCCL, so the vote of Note [All ranks or none] in
    step_scheduler.py is not possible. A rank whose hook fails has enqueued less than its peers,
    whose devices then wait for it, as when a rank fails in forward. A collective that it enqueued
    later would meet another one of its peers. Therefore the hook keeps failing on this rank until
    the job ends: backward has raised the error, and the time-out of the process group ends the
    others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replays = Replays(self._hook)
        self._can_capture = _can_capture(self._group, self._device)
        self._may_replay = False
        """Whether a rank may have replayed a bucket of this step; the same on all ranks."""
        self._private: dict[str, PrivateGroups] = {}  # by purpose
        self._state = StepState()
        self._failure: str | None = None
        """Why the hook fails until the job ends: Note [Failures on NCCL]."""
        self._exchange_stream = SideStream(self._device)
        self._handed_over: list[HookExecution] = []  # executions of this step, with exchanges
        self._begun: weakref.WeakSet[Exchange] = weakref.WeakSet()  # and not aborted

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        is_captured = self.is_captured(bucket.step)
        begins = bucket.index() == 0 or self._state.phase is Phase.IDLE
        recovers = begins and self._begin_step()
        if self._state.failure is not None:
            return HookExecution(self._hook, bucket, self._group).abort(self._state.failure)
        replay = None if is_captured else self._replay_of(bucket)
        if replay is not None and replay.is_captured:
            return self._launch(replay, bucket)
        execution = HookExecution(self._hook, bucket, self._group)
        execution.launch(self._stream, timed=self.capturable_from() is None)
        self._stream.follow(execution.mark, bucket.buffer())
        try:
            with self._stream, self._mode():
                self._check()
                if recovers:
                    self._hook.recover()
                if replay is None:
                    result = self._run(execution)
                else:
                    result = self._capture(replay, execution)
        except CommHookError as error:
            self._fail(error)
            return execution.abort(error)  # no variable of this frame may hold the future
        except BaseException as error:
            # Not of the hook: a signal has arrived on the thread of backward.
            self._fail(execution.error(f"{type(error).__name__}: {error}"))
            raise
        execution.record(self.collector)
        with self._stream:
            execution.future.set_result(result)
        if execution.comm.begun:
            self._handed_over.append(execution)
        if bucket.is_last():
            self._end_step()
        return execution.future

    def capturable_from(self) -> int | None:
        steps = [each.capturable_from for each in tree(self._hook)]
        known = [step for step in steps if step is not None]
        return max(known) if len(known) == len(steps) else None

    def has_run(self) -> bool:
        return self._replays.has_run()

    def _replay_of(self, bucket: GradBucket) -> Replay | None:
        """Return the graph that does the work of a step on a bucket, or that is to capture it."""
        first = self.capturable_from()
        if not self._can_capture or first is None or bucket.step < first:
            return None
        self._may_replay = replays.MAX_CAPTURES > 0
        return self._replays.of(bucket)

    def _capture(self, replay: Replay, execution: HookExecution) -> Tensor:
        try:
            with replay.capture():
                replay.result = self._run(execution)
        except CommHookError as error:
            raise type(error)(
                f"{error}. A CUDA graph captured it, because the hook declares `capturable_from`; "
                "COMMHOOKS_CUDA_GRAPHS=0 runs it without graphs"
            ) from error
        replay.run = execution.costs()
        replay.launch()
        return replay.result

    def _launch(self, replay: Replay, bucket: GradBucket) -> Future[Tensor]:
        """Replay the work of an earlier step on a bucket: Note [Replays] in replays.py."""
        start = time.monotonic_ns()
        future = new_future(self._device)
        self._stream.follow(self._stream.mark(), bucket.buffer())
        with self._stream:
            replay.launch()
            future.set_result(replay.result)
        ended = replace(replay.run, start_ns=start, end_ns=time.monotonic_ns())
        self.collector.record(ended, bucket)
        if bucket.is_last():
            self._end_step()
        return future

    def connect(self, stages: Mapping[tuple[int, ...], int]) -> None:
        """Connect communicators of these ranks, where the model's process group will not do."""
        if self._group.size() == 1:
            return
        if parts := {ranks: 1 for ranks in stages if ranks}:
            self._private_groups("steps").connect(parts)
        if any(each.has_exchanges for each in tree(self._hook)):
            self._private_groups("exchanges").connect(dict.fromkeys(stages, 1))

    def end_step(self, index: int, step: int) -> Future[Tensor]:  # noqa: ARG002
        """Begin the exchanges of the step. A backend that keeps the order has no vote."""
        if self._state.phase is Phase.OPEN:
            self._end_step()
        return completed(torch.empty(0))

    def abort(self, has_run: bool = True) -> None:  # noqa: ARG002
        """Fail the step if a bucket of it has run. None is ever on its way."""
        if self._state.phase is Phase.OPEN:
            text = f"[rank {self._group.rank()}] the backward pass ended before its last bucket"
            self._state.fail(CommHookError(text))

    def drain(self) -> None:
        """Let the current stream wait for the hook, whose state is read or replaced next.

        Raises:
            CommHookError: The hook has failed before, and peers wait for this rank.
        """
        self._check()
        for stream in (self._stream, self._exchange_stream):
            stream.join()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let exchanges, too, come before and after the work of the caller."""
        try:
            with super().between_steps():
                yield
        finally:
            with self._exchange_stream:
                self._record_states()

    def close(self) -> None:
        """End the hook's own communicators. The host waits for what is under way."""
        for stream in (self._stream, self._exchange_stream):
            stream.synchronize()
        self._replays.clear()
        for groups in self._private.values():
            groups.close()

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """Leave the modes of backward, whose thread has those of its caller."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            yield

    def _begin_step(self) -> bool:
        """Begin a step. Return whether the one before it failed, so that the hook must recover."""
        self._handed_over.clear()
        self._may_replay = False
        has_failed = self._state.begin()
        if has_failed:
            self._begun.clear()
            self._replays.clear()
        return has_failed

    def _check(self) -> None:
        if self._failure is not None:
            raise CommHookError(
                f"[rank {self._group.rank()}] the hook failed in an earlier step: {self._failure}. "
                "The other ranks wait for collectives that this rank did not issue; restart all "
                "ranks from a checkpoint"
            )

    def _fail(self, error: CommHookError) -> None:
        """Let the rest of the step fail; among several ranks, all later steps as well."""
        self._state.fail(type(error)(*error.args))  # a copy without a traceback, which keeps frames
        if self._group.size() > 1:
            self._failure = self._failure or str(error)

    def _end_step(self) -> None:
        """Begin the exchanges of the step, and let the backend know of its replays."""
        self._state.finish()
        self._run_exchanges()
        if self._may_replay and self._group.size() > 1:
            with self._stream:
                self._group.allreduce([torch.ones(1, device=self._device)])
        self._may_replay = False

    def _run_exchanges(self) -> None:
        """Enqueue the exchanges of this step, whose results streams of later steps wait for."""
        handed_over, self._handed_over = self._handed_over, []
        if not handed_over:
            return
        self._exchange_stream.follow(self._stream.end())
        for execution in handed_over:
            for exchange in execution.comm.begun:
                self._begun.add(exchange)
                self._run_exchange(ExchangeExecution(exchange, execution))

    def _run_exchange(self, execution: ExchangeExecution) -> None:
        try:
            with self._exchange_stream, self._mode():
                result = self._run(execution)
                execution.future.set_result(result)
        except CommHookError as error:
            execution.abort(error)
            return
        execution.record(self.collector)

    def _run(self, execution: HookExecution) -> Tensor:
        while (result := execution.step()) is None:
            if (exchange := execution.exchange) is not None:
                if exchange not in self._begun:
                    raise execution.error(NOT_BEGUN)
                exchange.result()
                continue
            collective, execution.pending = execution.pending, None
            assert collective is not None
            is_alone = execution.comm.size == 1 or len(collective.members) == 1
            if collective.is_vote or (is_alone and not SENDS_ALONE):
                continue
            execution.count(collective)
            try:
                collective.run(self._group_of(collective.members, execution))
            except Exception as error:
                if isinstance(error, CommHookPeerError) or is_peer_loss(error):
                    raise execution.peer_error(None, error) from error
                failure = execution.throw(error)
                raise failure from failure.__cause__
            execution.end_stage()
            execution.count_bytes(collective)
        return result

    def _group_of(self, ranks: tuple[int, ...], execution: HookExecution) -> dist.ProcessGroup:
        """Return the process group of these ranks, by default all."""
        if self._group.size() == 1 or not (ranks or execution.is_exchange):
            return self._group
        purpose = "exchanges" if execution.is_exchange else "steps"
        return self._private_groups(purpose).open(0, ranks)

    def _private_groups(self, purpose: str) -> PrivateGroups:
        if purpose not in self._private:
            groups = PrivateGroups(self._group, self._token, self._device, purpose=purpose)
            self._private[purpose] = groups
        return self._private[purpose]


def _can_capture(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether CUDA graphs may capture collectives of the group."""
    return device.type == "cuda" and family_of(group, device) == NCCL
