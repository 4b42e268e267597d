"""Rank processes that are forked from a template, a process that has imported torch already.

    tests                              template                     rank process
      | -- files, environment ------->   |
      |                                  |  fork  ------------------->  |
      | <-- pid ----------------------   |                              |
      | <-- exit code ----------------   |  waitpid  <------- ends --   |

Importing torch takes seconds of CPU time in each process that does so; forking takes milliseconds.
``commhooks`` starts each rank as a new process, because CUDA cannot be used in forked ones; so do
the tests where torch finds a device, and those that start scripts. The template has one thread and
no process group. It ends when its parent ends.

Note [Two templates]
~~~~~~~~~~~~~~~~~~~~
The hashes of strings are randomized when a process is started, not when it is forked. The ranks of
a cluster have different ones, so a hook that sends something in the order of a set fails there.
Ranks alternate between two templates, so that such a hook fails in the tests as well.
"""

import atexit
import itertools
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

import torch

from commhooks.cluster.ranks import start_worker

INT = struct.Struct("i")
"""The format of sizes, PIDs and exit codes on the wire."""
# Libraries read these when they are loaded, so templates serve processes that have the same. A
# rank gets the number in OMP_NUM_THREADS from its template, and Python's path with each call.
_READ_AT_IMPORT = ("GOMP_", "KMP_", "LD_", "MKL_", "OPENBLAS_", "TORCH_")

_templates: dict[object, "Template"] = {}
_turns = itertools.cycle((0, 1))


def can_fork() -> bool:
    return not torch.cuda.is_available() and hasattr(os, "pidfd_open")


def fork_worker(
    prefix: Sequence[str],
    passed: tuple[int, int],
    output: IO[bytes] | None,
    environment: Mapping[str, str],
) -> "ForkedProcess | subprocess.Popen[bytes]":
    """Fork what :func:`commhooks.cluster.ranks.start_worker` starts."""
    *command, host = prefix or [""]
    if command not in ([], ["ip", "netns", "exec"]):
        return start_worker(prefix, passed, output, environment)
    read = {name: text for name, text in environment.items() if name.startswith(_READ_AT_IMPORT)}
    keys = [(turn, *sorted(read.items())) for turn in (0, 1)]
    for key in keys:  # both, so that they import torch at the same time
        if key not in _templates or not _templates[key].is_alive():
            _templates[key] = Template(environment)
    return _templates[keys[next(_turns)]].fork(passed, output, environment, host)


class ForkedProcess:
    """The part of ``subprocess.Popen`` that ranks need."""

    def __init__(self, pid: int, stdin: int, status: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            with self._status:
                message = self._status.read(INT.size)
            if not message:  # the template has died, so nobody can tell the exit code
                self.send_signal(signal.SIGKILL)
            self.returncode = INT.unpack(message)[0] if message else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Template:
    """The parent's side of a template."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.template_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                start_new_session=True,
            )
        atexit.register(self._control.close)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self,
        passed: tuple[int, int],
        output: IO[bytes] | None,
        environment: Mapping[str, str],
        host: str,
    ) -> ForkedProcess:
        stdin, our_stdin = os.pipe()
        our_status, status = os.pipe()
        streams = [1, 2] if output is None else [output.fileno()] * 2
        data = pickle.dumps((dict(environment), host))
        files = [*passed, stdin, *streams, status]
        socket.send_fds(self._control, [INT.pack(len(data))], files)
        self._control.sendall(data)
        os.close(stdin)
        os.close(status)
        answers = os.fdopen(our_status, "rb", buffering=0)
        return ForkedProcess(INT.unpack(answers.read(INT.size))[0], our_stdin, answers)
