"""Run functions on several ranks, each in its own process, and return the results.

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
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch.distributed as dist

from commhooks.cluster.device import CPU, Device, DeviceError, take_device
from commhooks.cluster.group import join_group, local_store
from commhooks.cluster.links import ShapedLink
from commhooks.cluster.worker import READY, Call, CallResult, RankError
from commhooks.errors import CommHookError, CommHookPeerError, reason_of
from reducer.backends import NCCL, family_named

_SERVE = "from commhooks.cluster.worker import serve"
_LOG_LINES = 30
_START_SECONDS = 120.0  # to start a process and import torch on a slow, busy machine
_CLEANUP_SECONDS = 10.0  # for the other ranks to return after one has raised
_STACKS_SECONDS = 5.0  # for a signal handler to begin
_PORT = 29500  # in the namespace of host 0, where no other process listens
_PATIENCE = timedelta(hours=2)
"""A rank that has failed waits for peers, which wait for it until their own time-out."""
_REPORTING = 10.0  # seconds for ranks to report a collective that timed out: they know more


class RankStartError(RankError):
    """A rank did not start, or died between two calls."""


class RankCaller(ABC):
    """Runs functions on all ranks, each of which may keep an object between calls."""

    world_size: int
    local_world_size: int
    """The number of ranks on this machine."""
    device: Device
    """What the ranks compute on."""
    _kept_by: tuple[Callable[..., Any], *tuple[Any, ...]] | None = None

    @abstractmethod
    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results of ``fn(rank, *args, **kwargs)`` by rank."""

    def keep(self, factory: Callable[..., Any], /, *args: Any) -> None:
        """Keep ``factory(rank, *args)`` on each rank, in place of what was kept before."""
        self._kept_by = factory, *args
        self(_keep, *self._kept_by)

    def call(self, method: Callable[..., Any], /, *args: Any) -> list[Any]:
        """Return the results of ``method(kept, *args)`` by rank."""
        return self(_call, method, *args)

    def restart(self) -> None:
        """Make the ranks usable after an error. What they kept is made anew."""
        self._restart()
        if self._kept_by is not None:
            self.keep(*self._kept_by)

    @abstractmethod
    def _restart(self) -> None:
        """Make the ranks usable, without the state of earlier calls."""


_kept: list[Any] = []  # at most one object


def _keep(rank: int, factory: Callable[..., Any], *args: Any) -> None:
    _kept.clear()
    _kept.append(factory(rank, *args))


def _call(rank: int, method: Callable[..., Any], *args: Any) -> Any:  # noqa: ARG001
    return method(_kept[0], *args)


class Ranks(RankCaller, AbstractContextManager["Ranks"]):
    """A context manager of ``world_size`` ranks, over loopback or one on each host of ``link``.

    ``ranks(fn, ...)`` runs ``fn(rank, ...)`` on every rank. The output of the rank processes is
    shown only if one dies.

    Args:
        world_size: number of ranks.
        link: hosts to start the ranks on; None for loopback.
        device: what the ranks compute on, with its backend.
        threads: number of threads of each rank.
        timeout: of each collective, in seconds. A call ends 10 seconds after that, at the latest.
    """

    def __init__(
        self,
        world_size: int,
        link: ShapedLink | None = None,
        *,
        device: Device = CPU,
        threads: int = 1,
        timeout: float = 600.0,
    ) -> None:
        self.world_size = self.local_world_size = world_size
        self.device = device
        self._timeout = timeout
        self._link = link
        interface = "lo" if link is None else link.interface
        environment = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
        environment["OMP_NUM_THREADS"] = str(threads)
        self._pool = RankPool(link.prefixes if link else (), environment, keep_logs=True)
        self.restart()

    def _restart(self) -> None:
        """Start the ranks as new processes."""
        self._pool.close()
        if self._link is None:
            self._store = local_store()
            place, hosts = ("127.0.0.1", self._store.port), []
        else:  # in whose namespaces this process is not
            place, hosts = (self._link.address, _PORT), self._link.hosts
        try:
            self(join_group, self.world_size, *place, self._timeout, self.device.backend, hosts)
        except BaseException:
            self.close()
            raise

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results by rank; raises the errors of :meth:`RankPool.run`.

        After an error the group cannot be used until :meth:`restart`.
        """
        timeout = self._timeout + _REPORTING
        return self._pool.run(fn, self.world_size, args, kwargs, timeout=timeout)

    def close(self) -> None:
        self._pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class LaunchedRanks(RankCaller, AbstractContextManager["LaunchedRanks"]):
    """A context manager of this job's ranks. All of them run the same comparison.

    ``ranks(fn, ...)`` runs ``fn`` on this rank and returns the results of all ranks, so all come to
    the same decisions. If it raises on one rank, all of them raise that rank's error. If a process
    dies, torchrun ends all of them.

    Args:
        device: what the ranks compute on. A default process group must have its backend.
        timeout: of each collective, in seconds. A default process group keeps its own.
    """

    def __init__(self, device: Device = CPU, timeout: float = 600.0) -> None:
        self.device = device
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            if device.backend == NCCL:
                take_device(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
            dist.init_process_group(device.backend, timeout=timedelta(seconds=timeout))
        elif family_named(dist.get_backend()) != device.backend:
            raise DeviceError(
                f"expected a process group of {device.backend} for ranks on {device}, found "
                f"{dist.get_backend()}; pass device= for the group, or end it first"
            )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self._results = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results by rank. They are sent in a group of their own."""
        try:
            own = CallResult(fn(self.rank, *args, **kwargs))
        except Exception as error:
            own = CallResult.of_failure(error)
        found: list[CallResult] = [own] * self.world_size
        dist.all_gather_object(found, own, group=self._results)
        errors = [
            result.exception(rank, self.world_size)
            for rank, result in enumerate(found)
            if result.error is not None
        ]
        if errors:  # raise the first one that is not about another rank's
            raise min(errors, key=lambda each: isinstance(each, CommHookPeerError))
        return [result.value for result in found]

    def _restart(self) -> None:
        """Check that the ranks still answer each other: they are processes of torchrun."""
        try:
            self.device.barrier()
        except RuntimeError as error:
            raise CommHookError(
                "the ranks cannot go on after an error, because they do not answer each other any "
                f"more; compare without the hook that failed last: {reason_of(error)}"
            ) from error

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._owns_group and error is None:  # after an error, peers may not answer
            dist.destroy_process_group()


class RankProcess:
    """A process that answers calls; ``ready`` is True when it can take the next one.

    The process has no named resources: it inherits its connection, and its files are already
    deleted. So there is nothing to remove afterwards. It ends with this process.

    Args:
        prefix: words to put before the command, e.g. to start it in a network namespace.
        environment: environment variables to add to those of this process.
        keep_log: keep the output for :meth:`log` instead of showing it.

    Raises:
        CommHookError: this is a rank process that is still importing the main module; starting
            ranks from there would never end.
    """

    def __init__(
        self, prefix: Sequence[str], environment: Mapping[str, str], *, keep_log: bool
    ) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise CommHookError(
                "rank processes import the program's main module, and this process is importing "
                'it: start ranks under `if __name__ == "__main__":` or in a function'
            )
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        self._log = tempfile.TemporaryFile() if keep_log else None  # noqa: SIM115
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.ready = False
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        with theirs:
            passed = theirs.fileno(), self._stacks.fileno()
            self._process = start_worker(prefix, passed, self._log, environment)
        # What a rank needs to import the parent's ``__main__``, as multiprocessing sends it.
        data = multiprocessing.spawn.get_preparation_data("rank")
        del data["authkey"]
        self.connection.send_bytes(pickle.dumps(data))

    def send(self, call: Call) -> None:
        self.ready = False
        self.connection.send_bytes(call.pickled())

    def receive(self) -> CallResult | None:
        """Return the next message, or None for READY. Raises EOFError if the process has died."""
        message = self.connection.recv_bytes()
        if message == READY:
            self.ready = True
            return None
        result: CallResult = pickle.loads(message)
        return result

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """Wait for a process that is ending; return its exit code, negative for a signal.

        Returns None if the process is still running after 5 seconds.
        """
        try:
            return self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return None

    def stacks(self) -> str:
        """Return the stacks of all threads of the process, now or when it crashed."""
        if self.is_alive():
            before, deadline = self._stacks_bytes(), time.monotonic() + _STACKS_SECONDS
            self._process.send_signal(signal.SIGUSR1)
            # faulthandler writes in the signal handler, without the GIL.
            while self._stacks_bytes() == before and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.2)  # for the rest
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace")

    def _stacks_bytes(self) -> int:
        return os.fstat(self._stacks.fileno()).st_size

    def log(self) -> str:
        """Return the last lines of the output, if it was kept."""
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def kill(self) -> None:
        """End the process and its children; return when it is gone."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for file in (self._process.stdin, self.connection, self._stacks, self._log):
            if file is not None:
                file.close()


def start_worker(
    prefix: Sequence[str],
    passed: tuple[int, int],
    output: IO[bytes] | None,
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start a process that calls ``serve(*passed)`` of worker.py, with these environment variables.

    ``output`` receives the standard output and error; None stands for those of this process.
    """
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", f"{_SERVE}; serve{passed}"],
        stdin=subprocess.PIPE,  # is closed when this process ends
        stdout=output,
        stderr=output,
        pass_fds=passed,
        env=environment,
        start_new_session=True,  # the parent handles Ctrl-C
    )


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
                if result is None:  # the rank is ready
                    continue
                if result.error is None:
                    results[rank] = result.value
                elif failure is None or isinstance(failure, CommHookPeerError):
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
                    f"{result.traceback}"
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
