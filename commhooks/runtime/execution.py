"""One run of a hook on one bucket: the coroutine, its position, and its errors."""

import copy
import inspect
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from commhooks.comm.communicator import Communicator, PendingCollective
from commhooks.comm.exchange import Exchange, new_future
from commhooks.comm.point_to_point import BrokenConnectionError
from commhooks.errors import CommHookError, CommHookPeerError, CommHookResultError
from commhooks.hook.base import CommHook
from commhooks.runtime.recording import Run, Stage
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stats import StatsCollector
from reducer import GradBucket
from reducer.peers import describe_loss

_NO_RESULT = torch.empty(0)


class HookExecution:
    """The hook's coroutine for one bucket, from launch to result.

    Attributes:
        hook: The hook.
        bucket: The bucket that it gets.
        comm: The communicator that it gets.
        mark: Where backward's stream was when the bucket had been packed; see :meth:`launch`.
        future: The future of the average.
        pending: The collective that the hook awaits and that has not been issued.
        exchange: The exchange that the hook awaits.
        work: The collective under way.
        failure: Why it must end, if it must.
        issued: How many collectives have been issued, by the ranks that take part: Note [Subgroups]
            in comm/stage_groups.py.
        completed: How many of them have completed, or were sent between two ranks.
    """

    is_exchange = False
    """Whether it is an exchange, which cannot await another one: they end in any order."""

    def __init__(self, hook: CommHook, bucket: GradBucket, group: dist.ProcessGroup) -> None:
        self.hook = hook
        self.bucket = bucket
        self.comm = Communicator(
            group, step=bucket.step, key=bucket.key, seed=getattr(hook, "seed", 0)
        )
        self.mark: torch.Event | None = None
        self.future = new_future(bucket.buffer().device)
        self.pending: PendingCollective | None = None
        self.issued: dict[tuple[int, ...], int] = {}
        self.completed: dict[tuple[int, ...], int] = {}
        self.work: Work | None = None
        self.failure: CommHookError | None = None
        self.exchange: Exchange | None = None
        self._stages: list[Stage] = []
        self._start_ns = self._awaited_ns = self.comm.launched = time.monotonic_ns()
        self._coroutine: Coroutine[PendingCollective | Exchange, None, Tensor] = self._run()

    def launch(self, stream: SideStream, *, timed: bool) -> None:
        """Mark the place of the bucket on the current stream, which is that of backward."""
        self.mark = stream.mark(timed=timed)
        if self.mark is not None:
            self.comm.launched = self.mark

    @property
    def operation(self) -> str:
        """The name of the last collective that was issued."""
        return self._stages[-1].operation

    def step(self) -> Tensor | None:
        """Run the hook to its next ``await``, or return its result.

        Sets ``pending`` or ``exchange``. Must not be called while a collective is pending or under
        way, or an exchange is not over.

        Raises:
            CommHookError: The hook raised an exception: Note [Exceptions that are not errors].
        """
        self.exchange = None
        try:
            awaited = self._coroutine.send(None)
        except StopIteration as stop:
            result: Tensor = stop.value
            return result
        except CommHookResultError:
            raise
        except BaseException as error:
            raise self.error(f"{type(error).__name__}: {error}") from error
        if isinstance(awaited, Exchange) and not self.is_exchange:
            self.exchange = awaited
        elif isinstance(awaited, PendingCollective):
            self.pending = awaited
        else:
            raise self._result_error(
                "can await only what methods of its communicator return, e.g. `await "
                f"comm.all_reduce(tensor)`; it awaits {awaited!r}"
            )
        self._awaited_ns = time.monotonic_ns()
        return None

    def count(self, collective: PendingCollective) -> int:
        """Count ``collective`` as issued. Return its stage: how many were issued before it."""
        members = collective.members
        stage = self.issued.get(members, 0)
        self.issued[members] = stage + 1
        if (len(members) or self.comm.size) <= 2:
            self.completed = dict(self.issued)  # see Note [Order of collectives]
        collective.issued_ns = now = time.monotonic_ns()
        self._stages.append(Stage(collective.operation, members, self._awaited_ns, now))
        return stage

    def count_bytes(self, collective: PendingCollective) -> None:
        """Count the bytes that ``collective``, now under way, puts on the wire."""
        self._stages[-1].wire_bytes = collective.count()
        self.comm.wire_bytes += self._stages[-1].wire_bytes

    def end_stage(self) -> None:
        """Note that the collective has completed."""
        self._stages[-1].completed_ns = time.monotonic_ns()
        self.completed = dict(self.issued)  # no more than one is under way

    def costs(self) -> Run:
        """Return what this execution, which has finished, has cost."""
        key, index = self.bucket.key, self.bucket.index()
        times = self._start_ns, time.monotonic_ns()
        return Run(key, index, self.comm.wire_bytes, *times, self._stages, self.is_exchange)

    def record(self, collector: StatsCollector) -> None:
        """Tell ``collector`` the costs. An exchange adds its bytes to the bucket it began on."""
        collector.record(self.costs(), self.bucket)

    def end_collective(self) -> Exception | None:
        """Drop the collective that has completed, and return its error, if any.

        No frame may hold the work when the hook continues. An exception that the hook raises keeps
        all frames below it alive, and the work keeps the connections of its stage group open, whose
        end tells peers of a failure.
        """
        self.end_stage()
        work, self.work = self.work, None
        assert work is not None
        try:
            work.wait()
        except Exception as error:
            return error.with_traceback(None)  # which would keep this frame
        return None

    def throw(self, error: Exception) -> CommHookError:
        """Raise ``error`` at the hook's await, and return what results: nothing could be issued."""
        cause: BaseException = error
        self._interrupt()
        try:
            self._coroutine.throw(error)
        except BaseException as raised:
            cause = raised
        failure = self.error(f"{type(cause).__name__}: {cause}")
        failure.__cause__ = cause
        return failure

    def abort(self, error: CommHookError) -> Future[Tensor]:
        """Set what backward raises for ``error`` in the future. Drop the future, and return it.

        Nothing may be under way.

        An error that has been raised refers through its traceback to whatever the caller has,
        including the model; so the error that is raised must not be the one that is kept. Its cause
        refers to this execution, and the future to the error. The garbage collector cannot see that
        cycle because the future is in C++, so the future is dropped.
        """
        self.close()
        self.work = None
        future = self.future
        del self.future
        _set_exception(future, _copy_to_raise(error))
        return future

    def error(self, text: str, kind: type[CommHookError] = CommHookError) -> CommHookError:
        """Return an error with ``text`` and the place where it happened."""
        return kind(self._locate(text))

    def _locate(self, text: str) -> str:
        names = self.bucket.names
        parameters = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        issued = sum(self.issued.values())
        place = "in the exchange that it began on" if self.is_exchange else "on"
        return (
            f"[rank {self.comm.rank}] hook {self.hook!r} failed {place} bucket "
            f"{self.bucket.index()} (parameters {parameters}) at step {self.bucket.step}, after "
            f"{issued} collectives: {text}"
        )

    def peer_error(self, reason: str | None, error: Exception) -> CommHookPeerError:
        """Return the error for a collective that failed, most likely because of another rank.

        ``reason``: what another rank has published.
        """
        if reason:
            failure = CommHookPeerError(f"[rank {self.comm.rank}] another rank failed: {reason}")
        elif isinstance(error, CommHookPeerError) and not isinstance(error, BrokenConnectionError):
            failure = CommHookPeerError(self._locate(str(error)))  # of connecting, and complete
        else:
            failure = CommHookPeerError(
                self._locate(describe_loss(self.comm.group, self.operation, error))
            )
        failure.__cause__ = error
        return failure

    def close(self) -> None:
        """End the coroutine at its present await."""
        self.pending = None
        self._interrupt()
        # Its `finally` blocks may raise whatever they like: the step fails already, on all ranks,
        # and reports the error that came first.
        with suppress(BaseException):
            self._coroutine.close()

    def _interrupt(self) -> None:
        """Note that the hook, if it waits, was given no time to await all of its collectives."""
        if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_SUSPENDED:
            for each in self.comm.collectives:
                each.is_awaited = True

    async def _run(self) -> Tensor:
        result = await self.hook.reduce(self.bucket, self.comm)
        self._check(result)
        if self.bucket.is_last():
            await _vote()
        return result.detach().reshape(-1)

    def _check(self, result: Any) -> None:
        buffer = self.bucket.buffer()
        expected = f"{buffer.numel()} elements of {buffer.dtype} on {buffer.device}"
        if isinstance(result, PendingCollective):
            result.is_awaited = True  # or it would warn as well
            raise self._result_error(
                f"returned comm.{result.operation}() itself; expected the average, so `await` it"
            )
        if not isinstance(result, Tensor):
            raise self._result_error(
                f"returned {type(result).__name__}; expected the average, {expected}"
            )
        if (result.numel(), result.dtype, result.device) != (
            buffer.numel(),
            buffer.dtype,
            buffer.device,
        ):
            raise self._result_error(
                f"returned {result.numel()} elements of {result.dtype} on {result.device}; "
                f"expected the average, {expected}"
            )

    def _result_error(self, text: str) -> CommHookError:
        return self.error(text, CommHookResultError)


class ExchangeExecution(HookExecution):
    """The coroutine of an exchange: Note [Exchanges between steps] in comm/exchange.py."""

    is_exchange = True

    def __init__(self, exchange: Exchange, begun_by: HookExecution) -> None:
        assert exchange.run is not None
        self._function = exchange.run
        super().__init__(begun_by.hook, begun_by.bucket, begun_by.comm.group)
        exchange.future = self.future
        self.comm.collectives = begun_by.comm.collectives

    async def _run(self) -> Tensor:
        result = await self._function()
        if not isinstance(result, Tensor):
            raise self._result_error(f"returned {type(result).__name__}; expected a tensor")
        return result.detach()


class EndOfStep(HookExecution):
    """The vote of a step in which no bucket ``is_last()``, as an execution on an empty bucket."""

    def record(self, collector: StatsCollector) -> None:
        """Do nothing: the statistics are those of buckets."""

    def _locate(self, text: str) -> str:
        return f"[rank {self.comm.rank}] the end of step {self.bucket.step} failed: {text}"

    async def _run(self) -> Tensor:
        await _vote()
        return self.bucket.buffer()


def _copy_to_raise(failure: CommHookError) -> BaseException:
    """Return a copy of what ends backward on this rank.

    Note [Exceptions that are not errors]: a hook may raise SystemExit, KeyboardInterrupt,
    CancelledError or what ``pytest.fail`` raises, which are no Exceptions, so that ``except
    Exception`` lets them pass. They must pass backward as well. Whatever a hook raises becomes a
    CommHookError, with which the step fails on all ranks; only what backward raises on this rank is
    such an exception itself.
    """
    cause = failure.__cause__
    if cause is not None and not isinstance(cause, Exception):
        with suppress(Exception):  # it has a constructor of its own, and cannot be copied
            raised = copy.copy(cause).with_traceback(cause.__traceback__)
            raised.__notes__ = [*getattr(cause, "__notes__", ()), str(failure)]
            return raised
    error = type(failure)(*failure.args)
    error.__cause__ = cause
    return error


def _set_exception(future: Future[Tensor], error: BaseException) -> None:
    """Set ``error``, as ``Future.set_exception`` does, which takes Exceptions only."""

    def unwrap(value: BaseException) -> NoReturn:
        raise value

    future._set_unwrap_func(unwrap)  # noqa: SLF001
    future.set_result(error)  # type: ignore[arg-type]  # as torch does


def _vote() -> PendingCollective:
    """Return the barrier of Note [All ranks or none] in step_scheduler.py."""
    return PendingCollective("vote", lambda group: group.barrier(), _NO_RESULT, int, is_vote=True)
