"""A progress bar that tells how long the rest will take."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from commhooks.lab.comparison.progress import ProgressCallback

__all__ = ["progress_bar"]


class _TimeLeft(ProgressColumn):
    """The estimate, which counts down between two updates."""

    def render(self, task: Task) -> Text:
        if not task.total:
            return Text("")
        seconds = round(max(0.0, task.total - (task.elapsed or 0.0)))
        hours, minutes = divmod(seconds // 60, 60)
        clock = (
            f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"
        )
        return Text(f"about {clock} left")


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Show a bar on the standard error output, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), _TimeLeft())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(what: str, done: float, total: float) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield update
