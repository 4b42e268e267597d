"""Runs a function on several ranks, each in a process of its own, and gives back what they return.

Importing torch costs seconds, so the processes are kept and used again by later calls. Each call
gets a default process group of its own, so nothing is carried over from one call to the next:

    run_ranks(fn, 2)      parent                          worker 0, worker 1
                            | -- Call (pickled) ---------->  |
                            |                                |  init_process_group
                            |                                |  fn(rank, world_size)
                            | <--------- Outcome ----------- |
                            |                                |  destroy_process_group
                            | <--------- READY ------------- |

No process outlives its parent: a worker whose parent is gone ends by itself, and one that hangs is
killed by the parent, or, should that be gone as well, by a timer that does not need the GIL.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from commhooks.testing.rank_worker import READY, Call, Outcome, serve

__all__ = ["RankError", "close_ranks", "run_ranks"]

_START_SECONDS = 120.0  # to start a process and import torch on a slow, busy machine
_CLEANUP_SECONDS = 10.0  # for the other ranks to come back once one has raised


class RankError(RuntimeError):
    """A rank died, or raised something that cannot be sent to another process."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Runs ``fn(rank, world_size, *args, **kwargs)`` on every rank; returns the results by rank.

    ``fn`` is a module-level function, its arguments and its result can be pickled. It runs inside a
    fresh default process group of ``backend``, with one thread per rank, torch's generator seeded
    alike on all ranks, and the warning filters of the caller.

    Raises:
        Exception: the first error of any rank, of its own type where that can be pickled, with the
            rank and the remote traceback as a note.
        TimeoutError: after ``timeout`` seconds, with the stacks of the ranks still running.
        RankError: a rank died.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, found {world_size}")
    with _lock:
        try:
            return _run(fn, world_size, args, kwargs, timeout, backend)
        except BaseException:
            _reap([worker for worker in _workers if not worker.ready])
            raise


def close_ranks() -> None:
    """Ends all worker processes; the next :func:`run_ranks` starts fresh ones."""
    with _lock:
        _reap(list(_workers))


class _Worker:
    """One process of the pool; ``ready`` for a call once it has cleaned up after the last."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        with tempfile.NamedTemporaryFile(prefix="rank-stacks-", delete=False) as file:
            self.stacks = Path(file.name)
        self.process = context.Process(target=serve, args=(remote, str(self.stacks)), daemon=True)
        self.process.start()
        remote.close()
        self.ready = False

    def send(self, call: Call) -> None:
        self.ready = False
        self.connection.send_bytes(pickle.dumps((call.path, pickle.dumps(call))))

    def receive(self) -> Outcome | None:
        """The next message, once the connection can be read; None for READY. EOFError: died."""
        message = self.connection.recv_bytes()
        if message == READY:
            self.ready = True
            return None
        outcome: Outcome = pickle.loads(message)
        return outcome

    def read_stacks(self) -> str:
        """What every thread of the process is doing right now."""
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)  # faulthandler writes in the signal handler, without the GIL
        return self.stacks.read_text()

    def exit_code(self) -> int | None:
        self.process.join(5.0)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()
        self.stacks.unlink(missing_ok=True)


_lock = threading.Lock()
_workers: list[_Worker] = []
atexit.register(close_ranks)


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    backend: str,
) -> list[Any]:
    workers = _start(world_size)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, worker in enumerate(workers):
        worker.send(Call(fn, args, kwargs, rank, world_size, backend, store.port, timeout))
    results: list[Any] = [None] * world_size
    failure: BaseException | None = None
    deadline = time.monotonic() + timeout
    while running := [worker for worker in workers if not worker.ready]:
        readable = wait([w.connection for w in running], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise failure or _timeout(workers, timeout)
        for rank, worker in enumerate(workers):
            if worker.connection not in readable:
                continue
            try:
                outcome = worker.receive()
            except (EOFError, ConnectionError):
                code = worker.exit_code()
                raise failure or RankError(
                    f"rank {rank} of {world_size} died with exit code {code}"
                ) from None
            if outcome is not None and outcome.error_text is None:
                results[rank] = outcome.value
            elif outcome is not None and failure is None:
                failure = _remote_error(rank, world_size, outcome)
                deadline = min(deadline, time.monotonic() + _CLEANUP_SECONDS)
    if failure is not None:
        raise failure
    return results


def _start(world_size: int) -> list[_Worker]:
    """The first ``world_size`` workers, started where missing, all ready."""
    while len(_workers) < world_size:
        _workers.append(_Worker())
    workers = _workers[:world_size]
    for rank, worker in enumerate(workers):
        if worker.ready and worker.process.is_alive():
            continue
        worker.ready = False
        if not worker.connection.poll(_START_SECONDS):
            raise TimeoutError(f"the process of rank {rank} did not start in {_START_SECONDS} s")
        try:
            worker.receive()
        except EOFError:
            code = worker.exit_code()
            raise RankError(f"the process of rank {rank} died with exit code {code}") from None
    return workers


def _remote_error(rank: int, world_size: int, outcome: Outcome) -> BaseException:
    error = pickle.loads(outcome.error) if outcome.error is not None else None
    where = f"raised on rank {rank} of {world_size}:\n{outcome.error_text}"
    if error is None:
        return RankError(where)
    assert isinstance(error, BaseException)
    error.add_note(where)
    return error


def _timeout(workers: list[_Worker], timeout: float) -> TimeoutError:
    running = [rank for rank, worker in enumerate(workers) if not worker.ready]
    error = TimeoutError(f"ranks {running} of {len(workers)} did not finish within {timeout} s")
    for rank in running:
        error.add_note(f"rank {rank} was here:\n{workers[rank].read_stacks()}")
    return error


def _reap(workers: list[_Worker]) -> None:
    for worker in workers:
        _workers.remove(worker)
        worker.kill()
