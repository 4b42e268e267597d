"""Ranks of which the last one dies: what the others raise."""

import gc
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from commhooks.cluster.group import join_group, local_store
from commhooks.cluster.ranks import RankProcess
from commhooks.cluster.worker import Call
from reducer import peers

LIMIT_SECONDS = 60.0
"""After which a test fails: nobody may wait that long."""


class Raised(NamedTuple):
    """An error, and the seconds until it was raised."""

    kind: str
    text: str
    seconds: float


class DyingRanks:
    """A context manager of ``size`` ranks; the last one is a new process in each run.

    ``run(fn, ...)`` runs ``fn(die, ...)`` on all ranks, in a new Gloo process group. ``die()`` ends
    the last rank. On the others it sets the time-out of the group, because what succeeds may take
    long on a loaded machine. Forking a rank takes a fraction of a second.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._survivors = [RankProcess((), {}, keep_log=True) for _ in range(size - 1)]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        how: str = "killed",
        timeout: float = LIMIT_SECONDS,
        backend: str = "gloo",
    ) -> list[Raised]:
        """Return what ``fn`` raised on each surviving rank.

        ``how``: killed, stopped, exits or raises. ``timeout`` is that of the process group after
        ``die()``. On NCCL the host waits for collectives.
        """
        store = local_store()
        victim = RankProcess((), {}, keep_log=True)
        processes = [*self._survivors, victim]
        try:
            for rank, process in enumerate(processes):
                while not process.ready:
                    assert process.receive() is None
                call_args = (rank, self._size, store.port, timeout, backend, how, fn, *args)
                process.send(Call(_run, call_args, {}, LIMIT_SECONDS, _leave))
            return [_result(process) for process in self._survivors]
        finally:
            victim.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._survivors:
            process.kill()


def _result(process: RankProcess) -> Raised:
    assert wait([process.connection], LIMIT_SECONDS), process.stacks()
    result = process.receive()
    assert result is not None
    assert result.error is None, result.traceback
    return result.value  # type: ignore[no-any-return]


def _run(
    rank: int,
    size: int,
    port: int,
    timeout: float,
    backend: str,
    how: str,
    fn: Callable[..., Any],
    *args: Any,
) -> Raised:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # or torch's watchdog ends the process
    join_group(rank, size, "127.0.0.1", port, LIMIT_SECONDS, backend=backend)
    # Without time-outs, a rank has left its note before its connections close.
    peers._GRACE_SECONDS = 0.05 if timeout == LIMIT_SECONDS else 2.0
    start = time.monotonic()
    raised = Raised("", "", 0.0)
    try:
        fn(lambda: _die(how) if rank == size - 1 else set_timeout(timeout), *args)
    except RuntimeError as error:
        raised = Raised(type(error).__name__, str(error), time.monotonic() - start)
    except KeyboardInterrupt:  # of the dying rank: most programs end with their exception
        os._exit(1)
    # A rank that is not in a collective does not notice. It must not be the next one to leave.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"survivor {rank}", "done")
    store.wait([f"survivor {other}" for other in range(size - 1)])
    return raised


def _die(how: str) -> None:
    if how == "raises":
        raise KeyboardInterrupt
    if how == "exits":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)


def set_timeout(seconds: float) -> None:
    """Set the time-out of the process group on this rank."""
    newest = getattr(dist, "set_timeout", None)  # from torch 2.15 on
    change = newest or dist.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=seconds), dist.group.WORLD)


def _leave() -> None:
    gc.collect()
    dist.destroy_process_group()
