"""The parent's side of one rank process."""

import multiprocessing
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO

from commhooks.cluster.call import READY, Call, CallResult
from commhooks.errors import CommHookError

__all__ = ["RankProcess", "start_worker"]

_LOG_LINES = 30


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
        self,
        prefix: Sequence[str],
        environment: Mapping[str, str],
        *,
        keep_log: bool,
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
        self._send_preparation()

    def _send_preparation(self) -> None:
        """Send what a rank needs to import the parent's ``__main__``, as multiprocessing does."""
        data = multiprocessing.spawn.get_preparation_data("rank")
        del data["authkey"]
        self.connection.send_bytes(pickle.dumps(data))

    def send(self, call: Call) -> None:
        """Start a call."""
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
        """Return whether the process is still running."""
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
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)  # faulthandler writes in the signal handler, without the GIL
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace")

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
    """Start a process that calls :func:`commhooks.cluster.worker.serve`.

    Args:
        prefix: words to put before the command.
        passed: the file descriptors that ``serve`` takes.
        output: receives the standard output and error; None for those of this process.
        environment: all environment variables of the process.
    """
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "commhooks.cluster.worker", *map(str, passed)],
        stdin=subprocess.PIPE,  # is closed when this process ends
        stdout=output,
        stderr=output,
        pass_fds=passed,
        env=environment,
        start_new_session=True,  # the parent handles Ctrl-C
    )
