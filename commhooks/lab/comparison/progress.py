"""How much of a comparison is done, in steps."""

from collections.abc import Callable, Iterable, Mapping

from commhooks.lab.comparison.plan import Task

__all__ = ["Progress", "ProgressCallback"]

ProgressCallback = Callable[[str, float, float], None]
"""Called with a description of the current work, the steps that are done, and all steps."""


class Progress:
    """Counts the steps of ``plan``, all tasks by the names of settings, and tells ``callback``."""

    def __init__(self, callback: ProgressCallback, plan: Mapping[str, Iterable[Task]]) -> None:
        self._callback = callback
        self._left = [(setting, task) for setting, tasks in plan.items() for task in tasks]
        self._done = 0

    def tell(self, setting: str, what: str) -> None:
        """Tell what is done now."""
        left = sum(task.all_steps for _, task in self._left)
        self._callback(f"{setting}: {what}", self._done, self._done + left)

    def end(self, setting: str, task: Task) -> None:
        """Note that a task is done."""
        self._left.remove((setting, task))
        self._done += task.all_steps

    def drop(self, name: str) -> None:
        """Forget a setting or an entry that cannot be measured."""
        self._left = [left for left in self._left if name not in (left[0], left[1].entry.name)]
