"""Ranks of which the last one dies: what the others raise."""

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping
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


_DEATH = "a rank dies at"


class Raised(NamedTuple):
    """An error, and the seconds until it was raised, since the start of the call.

    If the rank ended instead: "exit code", its output and the seconds since the death.
    """

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
        environment: Mapping[str, str] | None = None,
        patience: float = LIMIT_SECONDS,
    ) -> list[Raised]:
        """Return what ``fn`` raised on each surviving rank.

        ``how``: killed, stopped, exits or raises. ``timeout`` is that of the process group after
        ``die()``. ``environment``: variables of all ranks, by default those for NCCL that let the
        host wait for collectives. ``patience``: the most seconds for all of it.
        """
        if environment is None:
            environment = {"TORCH_NCCL_BLOCKING_WAIT": "1"}  # or torch's watchdog ends processes
        store = local_store()
        for i, process in enumerate(self._survivors):
            if not _is_ready(process):  # it died, or does not get out of its last group
                process.kill()
                self._survivors[i] = RankProcess((), {}, keep_log=True)
        victim = RankProcess((), {}, keep_log=True)
        processes = [*self._survivors, victim]
        try:
            for rank, process in enumerate(processes):
                assert _is_ready(process), process.stacks()
                limits = timeout, patience
                call_args = (rank, self._size, store.port, limits, backend, how, environment, fn)
                process.send(Call(_run, (*call_args, *args), {}, patience, _leave))
            return [_result(process, patience) for process in self._survivors]
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


def _is_ready(process: RankProcess) -> bool:
    """Wait until a process has ended what it did before; return whether it has."""
    with contextlib.suppress(EOFError, ConnectionError):
        while not process.ready and wait([process.connection], LIMIT_SECONDS):
            assert process.receive() is None
        return process.ready and process.is_alive()
    return False


def _result(process: RankProcess, patience: float) -> Raised:
    assert wait([process.connection], patience), process.stacks()
    try:
        result = process.receive()
    except (EOFError, ConnectionError):
        now, code, log = time.monotonic(), process.exit_code(), process._log
        assert log is not None
        log.seek(0)
        _, death, after = log.read().decode(errors="replace").rpartition(_DEATH)
        assert death, f"rank ended with exit code {code} before the death: {after[-2000:]}"
        moment, _, text = after.partition("\n")
        return Raised(f"exit code {code}", text, now - float(moment))
    assert result is not None
    assert result.error is None, result.traceback
    return result.value  # type: ignore[no-any-return]


def _run(
    rank: int,
    size: int,
    port: int,
    limits: tuple[float, float],
    backend: str,
    how: str,
    environment: Mapping[str, str],
    fn: Callable[..., Any],
    *args: Any,
) -> Raised:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    timeout, patience = limits
    os.environ.pop("TORCH_NCCL_BLOCKING_WAIT", None)  # of an earlier call
    os.environ.update(environment)
    join_group(rank, size, "127.0.0.1", port, patience, backend=backend)
    # Without time-outs, a rank has left its note before its connections close.
    peers._GRACE_SECONDS = 0.05 if timeout == LIMIT_SECONDS else 2.0

    def die() -> None:
        nonlocal start
        if rank == size - 1:
            _die(how)
        start = time.monotonic()
        print(_DEATH, start, flush=True)
        set_timeout(timeout)

    start = time.monotonic()
    raised = Raised("", "", 0.0)
    try:
        fn(die, *args)
    except RuntimeError as error:
        raised = Raised(type(error).__name__, str(error), time.monotonic() - start)
    except KeyboardInterrupt:
        pass
    if rank == size - 1 and how == "raises":  # most programs end with their exception
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


def set_timeout(seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Set the time-out of a process group on this rank, by default of all ranks."""
    newest = getattr(dist, "set_timeout", None)  # from torch 2.15 on
    change = newest or dist.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=seconds), group or dist.group.WORLD)


def _leave() -> None:
    gc.collect()
    dist.destroy_process_group()
