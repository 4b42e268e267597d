"""The parent's side of one rank's process."""

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

from commhooks.cluster.call import READY, Call, Outcome
from commhooks.errors import CommHookError

__all__ = ["RankProcess"]

_LOG_LINES = 30


class RankProcess:
    """A process that answers calls; ``ready`` for the next once it has cleaned up after the last.

    Nothing of it has a name: its connection is inherited, its files are deleted already. So there
    is nothing to remove, and it ends with this process.

    Args:
        prefix: put before the command, e.g. to start it in a network namespace.
        environment: besides that of this process.
        keep_log: what it prints is kept for :meth:`log`, not shown.

    Raises CommHookError in a process of a rank that is still importing the main module: there would
    be no end of it.
    """

    def __init__(
        self, prefix: Sequence[str], environment: Mapping[str, str], *, keep_log: bool
    ) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise CommHookError(
                "ranks are processes that import the program's main module, and this is one that "
                'does: put what starts ranks under `if __name__ == "__main__":`, or into a function'
            )
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        self._log = tempfile.TemporaryFile() if keep_log else None  # noqa: SIM115
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.ready = False
        command = [*prefix, sys.executable, "-m", "commhooks.cluster.worker"]
        with theirs:
            passed = theirs.fileno(), self._stacks.fileno()
            self._process = subprocess.Popen(
                [*command, *map(str, passed)],
                stdin=subprocess.PIPE,  # which ends when this process does
                stdout=self._log,
                stderr=self._log,
                pass_fds=passed,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        self._send_preparation()

    def _send_preparation(self) -> None:
        """What lets functions of the parent's ``__main__`` be called, as multiprocessing does."""
        data = multiprocessing.spawn.get_preparation_data("rank")
        del data["authkey"]
        self.connection.send_bytes(pickle.dumps(data))

    def send(self, call: Call) -> None:
        """Starts a call."""
        self.ready = False
        self.connection.send_bytes(call.pickled())

    def receive(self) -> Outcome | None:
        """The next message, once the connection can be read; None for READY. EOFError: died."""
        message = self.connection.recv_bytes()
        if message == READY:
            self.ready = True
            return None
        outcome: Outcome = pickle.loads(message)
        return outcome

    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """Of a process that is ending; negative for a signal. None if it goes on."""
        try:
            return self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return None

    def stacks(self) -> str:
        """What every thread of the process is doing, or was when it crashed."""
        if self.is_alive():
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)  # faulthandler writes in the signal handler, without the GIL
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace")

    def log(self) -> str:
        """The last lines that the process has printed, if they were kept."""
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def kill(self) -> None:
        """Ends the process and those that it has started; returns when it is gone."""
        if self.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        for file in (self._process.stdin, self.connection, self._stacks, self._log):
            if file is not None:
                file.close()
