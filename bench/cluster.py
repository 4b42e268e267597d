"""Ranks in processes of their own, driven step by step from the benchmark's process.

    benchmark                      rank 0, rank 1, ...
      | -- (function, arguments) ->  |
      |                              |  function(rank, *arguments)
      | <-- result or traceback ---- |

State between calls lives in the modules of the rank processes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0


class Cluster:
    """`world_size` rank processes with a Gloo process group; `prefixes` may move each elsewhere."""

    def __init__(
        self,
        world_size: int,
        prefixes: Sequence[Sequence[str]] = (),
        interface: str = "lo",
    ) -> None:
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="commhooks-bench-")
        address = str(Path(self._directory.name) / "socket")
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        with Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            for rank in range(world_size):
                prefix = prefixes[rank] if prefixes else ()
                command = [
                    *prefix,
                    sys.executable,
                    "-m",
                    "bench.rank",
                    address,
                    str(rank),
                    str(world_size),
                ]
                self._processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
                # One after the other, so that the order of connections is that of ranks.
                self._connections.append(listener.accept())
        for connection in self._connections:
            connection.send(None)  # all are there: the process group can form

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run ``function(rank, *arguments)`` on every rank; the results in order of ranks."""
        for connection in self._connections:
            connection.send((function, arguments))
        results = []
        errors = []
        for rank, connection in enumerate(self._connections):
            ok, result = connection.recv()
            (results if ok else errors).append(result if ok else f"rank {rank}:\n{result}")
        if errors:
            raise RuntimeError("\n".join(errors))
        return results

    def close(self) -> None:
        """End the ranks; those that do not end by themselves are killed."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.cleanup()


@contextlib.contextmanager
def cluster(world_size: int, **options: Any) -> Iterator[Cluster]:
    """A cluster that is closed whatever happens."""
    running = Cluster(world_size, **options)
    try:
        yield running
    finally:
        running.close()
