"""Rank processes that are forked from a template, a process that has imported torch already.

    parent                             template                     rank process
      | -- files, environment ------->   |
      |                                  |  fork  ------------------->  |
      | <----------------------------------------------------- pid --   |
      | <-- exit code ----------------   |  waitpid  <------- ends --   |

Importing torch takes seconds of CPU time in each process that does so; forking takes milliseconds.
The template has one thread, no device and no process group. It ends when its parent ends.

Note [Two templates]
~~~~~~~~~~~~~~~~~~~~
The hashes of strings are randomized when a process is started, not when it is forked. The ranks of
a cluster have different ones, so a hook that sends something in the order of a set fails there.
Ranks alternate between two templates, so that such a hook fails on one machine as well.
"""

import atexit
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

import torch

__all__ = ["INT", "ForkedProcess", "can_fork", "fork_rank"]

INT = struct.Struct("i")
"""The format of sizes, PIDs and exit codes on the wire."""
# Libraries read these when they are loaded, so a template serves processes that have the same.
_READ_AT_IMPORT = ("GLOO_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH")

_templates: dict[object, "_Template"] = {}


def can_fork() -> bool:
    """Return whether rank processes may be forked: CUDA cannot be used in a forked process."""
    return torch.version.cuda is None and torch.version.hip is None and hasattr(os, "pidfd_open")


def fork_rank(
    rank: int,
    connection: int,
    stacks: int,
    output: IO[bytes] | None,
    environment: Mapping[str, str],
) -> "ForkedProcess":
    """Start the process of ``rank``; see :func:`commhooks.cluster.worker.serve`.

    Args:
        rank: selects one of two templates, see Note [Two templates].
        connection: file descriptor of the connection.
        stacks: file descriptor of the file for stacks.
        output: receives the standard output and error; None for those of this process.
        environment: all environment variables of the process.
    """
    read = {name: text for name, text in environment.items() if name.startswith(_READ_AT_IMPORT)}
    key = rank % 2, os.getpid(), tuple(sorted(read.items()))
    if key not in _templates or not _templates[key].is_alive():
        _templates[key] = _Template(environment)
    return _templates[key].fork(connection, stacks, output, environment)


class ForkedProcess:
    """A process that a template forks; the part of ``subprocess.Popen`` that ranks need."""

    def __init__(self, stdin: int, status: int) -> None:
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.pid: int | None = None  # until it has started
        self.returncode: int | None = None
        self.status = os.fdopen(status, "rb", buffering=0)

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is starting or running."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises TimeoutExpired after ``timeout`` seconds."""
        while self.returncode is None:
            if not select.select([self.status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            message = self.status.read(INT.size)
            if not message:  # the template has died, so nobody can tell the exit code
                self.send_signal(signal.SIGKILL)
                self.returncode = -signal.SIGKILL
            elif self.pid is None:
                self.pid = INT.unpack(message)[0]
            else:
                self.returncode = INT.unpack(message)[0]
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has not started or has ended."""
        if self.pid is not None and self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Template:
    """The parent's side of a template."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "commhooks.cluster.template_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                start_new_session=True,
            )
        atexit.register(self._control.close)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self, connection: int, stacks: int, output: IO[bytes] | None, environment: Mapping[str, str]
    ) -> ForkedProcess:
        stdin, our_stdin = os.pipe()
        our_status, status = os.pipe()
        streams = [1, 2] if output is None else [output.fileno()] * 2
        data = pickle.dumps(dict(environment))
        with suppress(ConnectionError):  # it has died: the connection of the rank ends
            files = [connection, stacks, stdin, *streams, status]
            socket.send_fds(self._control, [INT.pack(len(data))], files)
            self._control.sendall(data)
        os.close(stdin)
        os.close(status)
        return ForkedProcess(our_stdin, our_status)
