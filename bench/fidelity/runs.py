"""The measured runs, and the comparison of each with plain averaging on the same data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import commhooks
from bench.fidelity.tasks import ALL_TASKS, TASKS
from bench.fidelity.trained_hooks import RANKS, REFERENCE, TrainedHook, trained_hooks, trained_on

PACKAGED = Path(commhooks.__file__).parent / "hook" / "fidelity.json"
"""The figures that the package shows: one per hook and task."""


@dataclass(frozen=True)
class Run:
    """One training. ``config``: the registered hook with all options.

    The others are means over ranks. ``seconds``: of all steps, without validation; None in old
    files. ``curve``: steps, the seconds until then, and the validation loss. ``bits_per_second``:
    of the link between ranks, None for loopback.
    """

    task: str
    hook: str
    config: dict[str, Any]
    recipe: str
    seed: int
    loss: float
    wire_bytes: float
    ranks: int = RANKS
    seconds: float | None = None
    curve: Sequence[tuple[int, float, float]] = ()
    bits_per_second: float | None = None


@dataclass(frozen=True)
class Row:
    """The runs of a hook on one task, and their changes of the validation loss, by seed.

    ``changes``: against plain averaging with the optimizer that the hook is compared with.
    ``changes_to_usual``: against that with the usual optimizer of the task. ``control_change``: the
    mean change of :attr:`TrainedHook.control` against the latter, None without one. ``byte_share``:
    the bytes that the hook sends, as a share of plain averaging.
    """

    trained: TrainedHook
    runs: Sequence[Run]
    changes: Sequence[float]
    changes_to_usual: Sequence[float]
    control_change: float | None
    byte_share: float

    @property
    def change(self) -> float:
        """Return the mean of ``changes``."""
        return mean(self.changes)

    @property
    def change_to_usual(self) -> float:
        """Return the mean of ``changes_to_usual``."""
        return mean(self.changes_to_usual)

    @property
    def cells(self) -> dict[str, Any]:
        """Return the cells of a table, by the names of its columns."""
        return {
            "hook": f"{self.trained.label} ({self.runs[0].recipe})",
            "loss": f"{mean(run.loss for run in self.runs):.4f}",
            "change": f"{self.change:+.1%}",
            "change by seed": ", ".join(f"{change:+.1%}" for change in self.changes),
            "allowed": f"{self.trained.tolerance:.0%}",
            "wire_bytes": mean(run.wire_bytes for run in self.runs),
            "share of plain": self.byte_share,
            "one rank alone": "" if (alone := self.control_change) is None else f"{alone:+.1%}",
        }


class Record:
    """The runs of a file of results, ``{"about": {...}, "runs": [...]}``."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.about: dict[str, Any] = document["about"]
        self._runs = []
        for entry in document["runs"]:
            known = {name: entry[name] for name in Run.__annotations__ if name in entry}
            self._runs.append(Run(**known | {"config": _completed(entry["config"])}))
        self._runs.sort(key=lambda run: run.seed)

    def runs(
        self, task: str, trained: TrainedHook, bits_per_second: float | None = None
    ) -> list[Run]:
        """Return the runs of a hook with its options, recipe, ranks and link, by seed."""
        wanted = {"task": task, "bits_per_second": bits_per_second}
        wanted |= trained.key(ALL_TASKS[task].usual)
        return [run for run in self._runs if wanted.items() <= vars(run).items()]

    def plain_runs(self, task: str) -> dict[str, list[Run]]:
        """Return the reference runs by recipe, the task's usual recipe first."""
        usual = ALL_TASKS[task].usual
        recipes = dict.fromkeys([usual, *(t.reference_recipe or usual for t in trained_hooks())])
        found = {recipe: self.runs(task, TrainedHook(REFERENCE, recipe)) for recipe in recipes}
        return {recipe: runs for recipe, runs in found.items() if runs}

    def row(self, task: str, trained: TrainedHook) -> Row | None:
        """Return the row of a hook, or None if it has not been run."""
        plain, usual = (
            self.runs(task, TrainedHook(REFERENCE, recipe))
            for recipe in (trained.reference_recipe, None)
        )
        seeds = {run.seed for run in plain} & {run.seed for run in usual}
        runs = [run for run in self.runs(task, trained) if run.seed in seeds]
        if not runs:
            return None
        seeds = {run.seed for run in runs}
        control = self.runs(task, trained.control) if trained.control else []
        alone = _changes([run for run in control if run.seed in seeds], usual)
        share = mean(run.wire_bytes for run in runs) / mean(run.wire_bytes for run in plain)
        changes, changes_to_usual = _changes(runs, plain), _changes(runs, usual)
        return Row(trained, runs, changes, changes_to_usual, mean(alone) if alone else None, share)

    @cached_property
    def rows(self) -> dict[str, list[Row]]:
        """The rows of hooks by name, then those of variants, by task with any runs."""
        found = {task: [self.row(task, each) for each in trained_on(task)] for task in ALL_TASKS}
        return {task: known for task, rows in found.items() if (known := [*filter(None, rows)])}

    @cached_property
    def by_hook(self) -> dict[str, dict[str, Row]]:
        """The rows of each hook at its present defaults, by published task."""
        found: dict[str, dict[str, Row]] = {}
        for task in TASKS:
            for row in self.rows.get(task, ()):
                if not row.trained.name:
                    found.setdefault(row.trained.hook, {})[task] = row
        return found

    @property
    def spreads(self) -> dict[str, float]:
        """The spreads of plain averaging with the usual recipe, by task with several seeds."""
        usual = {task: next(iter(self.plain_runs(task).values())) for task in self.rows}
        return {task: spread(runs) for task, runs in usual.items() if len(runs) > 1}

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the change of the validation loss in percent, by hook and task: :data:`PACKAGED`.

        Tasks on which a hook was not run are missing. ``seeds``: the number of seeds, of the task
        with the fewest.
        """
        return {
            hook: {task: round(100 * row.change, 1) for task, row in found.items()}
            | {"seeds": min(len(row.runs) for row in found.values())}
            for hook, found in sorted(self.by_hook.items())
        }


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """Add the options that the hook did not have when it was run, at their defaults."""
    try:
        return commhooks.create(config).to_config()
    except commhooks.CommHookError:
        return config  # with options or a hook that no longer exist


def _changes(runs: Sequence[Run], plain: Sequence[Run]) -> list[float]:
    losses = {run.seed: run.loss for run in plain}
    return [run.loss / losses[run.seed] - 1 for run in runs]


def spread(runs: Sequence[Run]) -> float:
    """Return the range of losses, relative to their mean."""
    losses = [run.loss for run in runs]
    return (max(losses) - min(losses)) / mean(losses)
