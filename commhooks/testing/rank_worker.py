"""The process of one rank, as :mod:`commhooks.testing.ranks` starts it."""

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

__all__ = ["READY", "Call", "Connection", "Outcome", "serve"]

READY = b"ready"
_SEED = 20190530  # the same on all ranks; tests that need different inputs add the rank


class Connection(Protocol):
    """What of ``multiprocessing.connection.Connection`` is used, the same on every platform."""

    def send_bytes(self, data: bytes, /) -> None: ...
    def recv_bytes(self) -> bytes: ...
    def poll(self, timeout: float | None = 0.0, /) -> bool: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...


@dataclass
class Call:
    """One function call on one rank. ``port``: of the rendezvous store, which the parent keeps."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    backend: str
    port: int
    timeout: float  # seconds
    # The parent's, because spawned processes have neither.
    path: list[str] = field(default_factory=lambda: list(sys.path))
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))


@dataclass
class Outcome:
    """``value`` if ``error_text`` is None, else the traceback as text and the pickled exception."""

    value: Any = None
    error_text: str | None = None
    error: bytes | None = None  # None where the exception does not survive pickling


def serve(calls: Connection, stacks_path: str) -> None:
    """Answers calls until the parent closes the connection or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    gc.freeze()  # what torch has loaded so far: makes the collection after each call cheap
    with Path(stacks_path).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        while True:
            calls.send_bytes(READY)
            try:
                message = calls.recv_bytes()
            except EOFError:
                return
            _answer(calls, message)


def _answer(calls: Connection, message: bytes) -> None:
    # Unpickling imports the caller's module, so its path has to be there first.
    path, pickled_call = pickle.loads(message)
    sys.path[:] = path
    try:
        call: Call = pickle.loads(pickled_call)
    except Exception as error:
        calls.send_bytes(_pickled(_failure(error)))
        return
    # A last resort against a process that hangs with the GIL held after its parent is gone.
    faulthandler.dump_traceback_later(call.timeout + 30, exit=True)
    try:
        # Sent before cleaning up, which may hang if something went wrong.
        calls.send_bytes(_pickled(_run(call)))
        gc.collect()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _run(call: Call) -> Outcome:
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    try:
        timeout = timedelta(seconds=call.timeout)
        store = TCPStore("127.0.0.1", call.port, is_master=False, timeout=timeout)
        if call.backend == "nccl":
            torch.cuda.set_device(call.rank)
        with warnings.catch_warnings():
            warnings.filters[:] = call.filters  # type: ignore[index]
            dist.init_process_group(
                call.backend,
                store=store,
                rank=call.rank,
                world_size=call.world_size,
                timeout=timeout,
            )
            return Outcome(call.fn(call.rank, call.world_size, *call.args, **call.kwargs))
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Outcome:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # some exceptions can be written but not read back
    except Exception:
        pickled = None
    return Outcome(error_text="".join(traceback.format_exception(error)), error=pickled)


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        return pickle.dumps(_failure(error))


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
