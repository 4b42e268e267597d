"""Commands that may hang: each has a time limit and does not affect the results of others."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_CHARACTERS = 3000
# The message of compute-sanitizer on machines that do not permit profiling.
REFUSAL = "Device not supported"


@dataclass(frozen=True)
class Stage:
    """A command, the most seconds that it gets, and what it needs, in the form of machine.py.

    ``may_time_out``: a time-out is no failure.
    """

    name: str
    command: Sequence[str]
    limit_seconds: float
    environment: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    may_time_out: bool = False


@dataclass(frozen=True)
class StageResult:
    """How a stage ended. ``tail``: the end of its output."""

    name: str
    status: str  # "passed", "failed", "timed out" or "left out"
    seconds: float
    tail: str

    @property
    def last_line(self) -> str:
        """The end of the output without the frame that pytest draws around it."""
        return (self.tail.strip().splitlines() or [""])[-1].strip("= ")

    @property
    def is_bad(self) -> bool:
        """Whether the result is a failure."""
        return self.status not in ("passed", "left out")


def run_stage(stage: Stage, limit_seconds: float, log: Path, directory: Path) -> StageResult:
    """Run a stage to its end or kill it with all its processes; write its output to ``log``."""
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            stage.command,
            cwd=directory,
            env={**os.environ, **dict(stage.environment)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_seconds)
            status = "passed" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            _end_group(process)
    seconds = time.monotonic() - start
    text = log.read_text(errors="replace")
    tail = text[-TAIL_CHARACTERS:]
    if status == "failed" and REFUSAL in text:
        status = "left out"
    elif status == "timed out" and stage.may_time_out:
        status, tail = "left out", f"{tail}\nnot finished after {seconds:.0f} s"
    return StageResult(stage.name, status, seconds, tail)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group, including processes that the command left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
