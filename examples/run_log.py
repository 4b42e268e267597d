"""The output of a run: a progress bar for people and a JSON-lines file for programs."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RunLog:
    """Show and record the progress of a run. Only rank 0 prints.

    Every line of the file is an object whose ``event`` is ``run`` (once per start), ``step`` or
    ``evaluation``. When a run resumes at a step, lines of later steps are removed first: that work
    was lost, and each step should appear once.
    """

    def __init__(self, title: str, steps: int, path: Path | None, *, enabled: bool) -> None:
        self._enabled = enabled
        self._path = path
        self._file: TextIO | None = None
        self._console = Console(quiet=not enabled)
        self._progress = Progress(
            TextColumn(f"[bold]{title}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("validation {task.fields[validation]}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not enabled,
        )
        self._task = self._progress.add_task(
            title, total=steps, loss=float("nan"), validation="-", speed=0.0
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()

    def start(self, step: int, about: dict[str, Any]) -> None:
        """Start after ``step`` steps."""
        self._progress.update(self._task, completed=step)
        if self._enabled and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = _lines_until(self._path, step) if step else []
            self._path.write_text("".join(kept))
            self._file = self._path.open("a", buffering=1)  # complete lines, even if killed
        self._write({"event": "run", "step": step, **about})

    def step(self, record: dict[str, Any]) -> None:
        """Report a training step."""
        self._progress.update(
            self._task,
            completed=record["step"],
            loss=record["loss"],
            speed=record["tokens_per_second"],
        )
        self._write({"event": "step", **record})

    def evaluation(self, record: dict[str, Any]) -> None:
        """Report a validation."""
        loss = f"{record['loss']:.3f}"
        self._progress.update(self._task, validation=loss)
        if not self._console.is_terminal:  # which would only show the final bar
            self._console.print(f"step {record['step']}: validation loss {loss}", highlight=False)
        self._write({"event": "evaluation", **record})

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, highlight=False)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _lines_until(path: Path, step: int) -> list[str]:
    """Return the complete lines of ``path`` for steps up to ``step``."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
