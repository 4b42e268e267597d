"""Runs each rank of a trial in a forked process, and ends them all."""

import faulthandler
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from soak.outcome import Outcome
from soak.training import TIMEOUT, train
from soak.trial import Trial

__all__ = ["End", "run"]

_DEADLINE = 6 * TIMEOUT
"""Seconds after which a trial counts as hung."""
_SHORT_STOP, _LONG_STOP = 0.2 * TIMEOUT, 1.5 * TIMEOUT


@dataclass
class End:
    """How the process of one rank ended."""

    outcome: Outcome | None = None
    """None if the rank did not get to report."""
    code: int | None = None
    """None if the rank was still running at the deadline."""
    at: float = 0.0
    log: str = ""
    """What the process printed; of a rank that hung, also the stacks of its threads."""


def run(trial: Trial, folder: Path, *, first: int = 0) -> list[End]:
    """Run a trial from step ``first``; return how each rank ended."""
    sys.stdout.flush()
    pids = {_fork(rank, trial, folder, first): rank for rank in range(trial.world_size)}
    ends = [End() for _ in range(trial.world_size)]
    running = dict(pids)
    deadline = time.monotonic() + _DEADLINE
    wake: dict[int, float] = {}
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            now = time.monotonic()
            for stopped in [stopped for stopped, at in wake.items() if at <= now]:
                os.kill(stopped, signal.SIGCONT)
                del wake[stopped]
            time.sleep(0.005)
        elif os.WIFSTOPPED(status):
            length = _LONG_STOP if trial.fault.kind == "long stop" else _SHORT_STOP
            wake[pid] = time.monotonic() + length
        elif pid in running:
            end = ends[running.pop(pid)]
            end.code, end.at = os.waitstatus_to_exitcode(status), time.monotonic()
    for pid in running:
        os.kill(pid, signal.SIGUSR1)  # writes the stacks
    if running:
        time.sleep(0.5)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for rank, end in enumerate(ends):
        report = folder / f"outcome-{first}-{rank}.pkl"
        if report.exists():
            end.outcome = pickle.loads(report.read_bytes())
        end.log = (folder / f"log-{first}-{rank}.txt").read_text(errors="replace")
    return ends


def _fork(rank: int, trial: Trial, folder: Path, first: int) -> int:
    pid = os.fork()
    if pid == 0:
        _in_child(rank, trial, folder, first)
    return pid


def _in_child(rank: int, trial: Trial, folder: Path, first: int) -> NoReturn:
    try:
        log = (folder / f"log-{first}-{rank}.txt").open("w")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, log, all_threads=True)
        train(rank, trial, folder, first=first, report=_writer(rank, folder, first))
        log.flush()
    finally:
        os._exit(0)


def _writer(rank: int, folder: Path, first: int) -> Callable[[Outcome], None]:
    def write(outcome: Outcome) -> None:
        path = folder / f"outcome-{first}-{rank}.pkl"
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(outcome))
        part.rename(path)

    return write
