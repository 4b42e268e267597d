"""A rank process: it answers the calls that its parent sends.

It is started with two file descriptors: a connection on which calls arrive, and a file to which the
stacks of all threads are written on SIGUSR1 and in a crash. It ends when its standard input is
closed, that is when its parent ends.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from commhooks.errors import CommHookError

READY = b"ready"


class RankError(CommHookError):
    """A rank died, or raised an exception that cannot be raised here."""


@dataclass
class Call:
    """One function call on one rank; ``timeout`` is in seconds."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float
    after: Callable[[], None] | None = None
    """Called after the result has been sent, because it may hang if something went wrong."""
    # Rank processes have neither the parent's path nor its warning filters.
    path: list[str] = field(default_factory=lambda: list(sys.path))
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))

    def pickled(self) -> bytes:
        """Return the message.

        The path is pickled separately, because unpickling the rest imports the caller's module.
        """
        return pickle.dumps((self.path, pickle.dumps(self)))


@dataclass
class CallResult:
    """The answer to a call: ``value``, or the ``error`` that it raised, with its traceback as text.

    An exception that cannot be pickled, or would end the parent, is replaced by a RankError.
    """

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    @classmethod
    def of_failure(cls, error: BaseException) -> "CallResult":
        """Return a result with the exception, or with its text if it cannot be sent."""
        text = "".join(traceback.format_exception(error))
        sendable = not isinstance(error, SystemExit | KeyboardInterrupt)
        try:
            pickle.loads(pickle.dumps(error))  # some exceptions can be pickled but not unpickled
        except Exception:
            sendable = False
        return cls(
            error=error if sendable else RankError(f"{type(error).__name__}: {error}"),
            traceback=text,
        )

    def exception(self, rank: int, world_size: int) -> BaseException:
        """Return the error, with the rank and its traceback as a note."""
        assert self.error is not None
        self.error.add_note(f"raised on rank {rank} of {world_size}:\n{self.traceback}")
        return self.error

    def pickled(self) -> bytes:
        """Return the message: this result, or the reason why it cannot be pickled."""
        try:
            return pickle.dumps(self)
        except Exception as error:
            return pickle.dumps(CallResult.of_failure(error))


def serve(connection: int, stacks: int) -> None:
    """Answer calls until the parent closes the connection or dies, then end the process.

    Args:
        connection: file descriptor of the connection on which calls arrive.
        stacks: file descriptor of the file for the stacks of all threads.
    """
    calls = Connection(connection)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        # The first forward of a wrapped model imports it; do so outside of any call's timeout.
        importlib.import_module("torch._dynamo")
        _prepare(calls.recv_bytes())
    except BaseException as error:  # a main module may call sys.exit
        calls.send_bytes(CallResult.of_failure(error).pickled())
        os._exit(1)
    gc.freeze()  # collections skip the objects loaded so far
    while True:
        calls.send_bytes(READY)
        try:
            message = calls.recv_bytes()
        except EOFError:
            break
        _answer(calls, message)
    # Do not leave the process group: that may wait for ranks which are already gone.
    sys.stdout.flush()
    os._exit(0)


def _prepare(data: bytes) -> None:
    """Import the parent's main module, which must not start ranks during the import."""
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # noqa: SLF001  # the flag of multiprocessing's own processes
    try:
        multiprocessing.spawn.prepare(pickle.loads(data))
    finally:
        del process._inheriting  # noqa: SLF001


def _answer(calls: Connection, message: bytes) -> None:
    path, pickled_call = pickle.loads(message)
    sys.path[:] = path
    try:
        call: Call = pickle.loads(pickled_call)
    except Exception as error:
        calls.send_bytes(CallResult.of_failure(error).pickled())
        return
    # A last resort: ends a process that holds the GIL forever after its parent is gone.
    faulthandler.dump_traceback_later(call.timeout + 30, exit=True)
    try:
        try:
            with warnings.catch_warnings():
                filters: Any = warnings.filters
                filters[:] = call.filters
                result = CallResult(call.fn(*call.args, **call.kwargs))
        except BaseException as error:
            result = CallResult.of_failure(error)
        data = result.pickled()
        del result  # with the frames of an error, which keep what it used, such as CUDA graphs
        calls.send_bytes(data)
        if call.after is not None:
            call.after()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the other end is closed: nothing is ever written
    os._exit(1)
