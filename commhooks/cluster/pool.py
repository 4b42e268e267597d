"""Run functions on several ranks and return their results, or raise the first error.

    RankPool                          process 0, process 1, ...
      | -- Call (pickled) ---------->   |
      |                                 |  call.fn(...)
      | <------- CallResult ----------- |
      |                                 |  call.after()
      | <--------- READY -------------- |

Importing torch takes seconds, so processes are kept and reused by later calls. None of them
outlives its parent: a process whose parent is gone ends by itself, and a process that hangs is
killed by the parent or, if the parent is gone as well, by a timer that does not need the GIL.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from commhooks.cluster.call import Call, RankError
from commhooks.cluster.process import RankProcess
from commhooks.errors import CommHookPeerError

__all__ = ["RankError", "RankPool", "RankStartError"]

_START_SECONDS = 120.0  # to start a process and import torch on a slow, busy machine
_CLEANUP_SECONDS = 10.0  # for the other ranks to return after one has raised


class RankStartError(RankError):
    """A rank did not start, or died between two calls."""


class RankPool:
    """Rank processes that are started when they are first needed.

    Args:
        prefixes: for each rank, the words to put before its command; none by default.
        environment: environment variables to add to those of this process.
        keep_logs: capture the output of the ranks, and show it only in the error if one dies.
    """

    def __init__(
        self,
        prefixes: Sequence[Sequence[str]] = (),
        environment: Mapping[str, str] | None = None,
        *,
        keep_logs: bool = False,
    ) -> None:
        self._prefixes = prefixes
        self._environment = dict(environment or {})
        self._keep_logs = keep_logs
        self._lock = threading.Lock()
        self._processes: list[RankProcess] = []

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        after: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run ``fn(rank, *args, **kwargs)`` on every rank; return the results by rank.

        Each rank calls ``after()`` when its result has been sent. After an error, processes that do
        not return from the call are ended. ``timeout`` is in seconds.

        Raises:
            Exception: the first error of any rank, of its own type if that can be pickled, with the
                rank and the remote traceback as a note. The error of a rank comes before those that
                its peers raise because of it.
            TimeoutError: with the stacks of the ranks still running.
            RankError: a rank died during the call.
            RankStartError: a rank died before the call, or did not start.
        """
        calls = [
            Call(fn, (rank, *args), dict(kwargs or {}), timeout, after)
            for rank in range(world_size)
        ]
        with self._lock:
            try:
                return self._run(calls, timeout)
            except BaseException:
                self._end([p for p in self._processes if not (p.ready and p.is_alive())])
                raise

    def close(self) -> None:
        """End all processes; the next call starts new ones."""
        with self._lock:
            self._end(list(self._processes))

    def _run(self, calls: Sequence[Call], timeout: float) -> list[Any]:
        processes = self._start(len(calls))
        for process, call in zip(processes, calls, strict=True):
            with contextlib.suppress(ConnectionError):  # it has died: receive() reports it
                process.send(call)
        results: list[Any] = [None] * len(calls)
        failure: BaseException | None = None
        deadline = time.monotonic() + timeout
        while running := [process for process in processes if not process.ready]:
            left = max(0.0, deadline - time.monotonic())
            readable = wait([process.connection for process in running], left)
            if not readable:
                raise failure or _timeout(processes, timeout)
            for rank, process in enumerate(processes):
                if process.connection not in readable:
                    continue
                try:
                    result = process.receive()
                except (EOFError, ConnectionError):
                    # It may be why another rank, which lost its connection, has failed before.
                    raise RankError(_death(rank, len(calls), process)) from failure
                if result is not None and result.error_text is None:
                    results[rank] = result.value
                elif result is not None and (
                    failure is None or isinstance(failure, CommHookPeerError)
                ):
                    failure = result.exception(rank, len(calls))
                    deadline = min(deadline, time.monotonic() + _CLEANUP_SECONDS)
        if failure is not None:
            raise failure
        return results

    def _start(self, world_size: int) -> list[RankProcess]:
        """Return the first ``world_size`` processes, started if they are missing, all ready."""
        while (rank := len(self._processes)) < world_size:
            prefix = self._prefixes[rank] if self._prefixes else ()
            process = RankProcess(prefix, self._environment, keep_log=self._keep_logs)
            self._processes.append(process)
        processes = self._processes[:world_size]
        for rank, process in enumerate(processes):
            if process.ready and process.is_alive():
                continue
            process.ready = False
            if not process.connection.poll(_START_SECONDS):
                raise RankStartError(f"rank {rank} did not start within {_START_SECONDS} s")
            try:
                result = process.receive()
            except (EOFError, ConnectionError):
                raise RankStartError(
                    _death(rank, world_size, process, "before this call ")
                ) from None
            if result is not None:
                raise RankStartError(
                    f"rank {rank} of {world_size} cannot import the main module:\n"
                    f"{result.error_text}"
                )
        return processes

    def _end(self, processes: Sequence[RankProcess]) -> None:
        for process in processes:
            self._processes.remove(process)
            process.kill()


def _death(rank: int, world_size: int, process: RankProcess, when: str = "") -> str:
    text = f"rank {rank} of {world_size} died {when}with exit code {process.exit_code()}"
    for what, lines in [
        ("the last lines of its output", process.log()),
        ("its threads were here", process.stacks()),
    ]:
        if lines:
            text += f"\n{what}:\n{lines}"
    return text


def _timeout(processes: Sequence[RankProcess], timeout: float) -> TimeoutError:
    running = [rank for rank, process in enumerate(processes) if not process.ready]
    error = TimeoutError(f"ranks {running} of {len(processes)} did not finish within {timeout} s")
    for rank in running:
        error.add_note(f"rank {rank} was here:\n{processes[rank].stacks()}")
    return error
