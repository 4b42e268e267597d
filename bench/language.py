"""The language task over links: the loss over steps times the time of a step.

The loss over steps is that of ``python -m bench.fidelity --task language``. Times are those of the
first training steps, so that the warm-ups of hooks count, for each link by ::

    commhooks compare --model bench.language:make_gpt --input bench.language:make_batch \\
        --train bench.language:train --link 100mbit --world-size 4 --hooks ...

Whole trainings over a link, ``python -m bench.fidelity --task language --link 100mbit``, show how
far the product is off.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench import tables
from bench.fidelity.runs import Record, Row, Run
from bench.fidelity.tasks import LANGUAGE
from bench.fidelity.trained_hooks import RANKS, REFERENCE, TrainedHook, trained_on
from bench.fidelity.training import fit
from bench.files import newest
from commhooks.costs.units import format_rate
from commhooks.hook.spec import hook_spec

TASK = "language"
RUNS = f"*-{TASK}.json"
STEPS_OVER_LINKS = f"*-{TASK}-steps-*.json"
"""Files of ``commhooks compare``, one for each link; the newest one of a link counts."""
RATES = (1e8, 1e9, 1e10)
HEADLINE = RATES[0]
ALONE = "noop"
_SETTLED = 200
"""Steps after which all warm-ups are over, and the time of a step is the same to the end."""
_CLOSE, _FAR = 0.01, 0.05
"""The largest mean changes of the loss with which a hook gets there, and is in the headline."""
_LIMIT = 0.02
"""The largest change of the loss on the published tasks, unless the headline tells it."""
_SEED = 0
_MISSING = "(not yet measured)"


def make_gpt() -> nn.Module:
    """Create the model."""
    return LANGUAGE.make_data().model()


def make_batch() -> tuple[Tensor, Tensor]:
    """Return a batch, another one on each rank, because torch's generators differ there."""
    return LANGUAGE.make_data().batch(_SEED, 0, int(torch.randint(1000, ())))


def train(model: nn.Module, rank: int, world_size: int) -> Iterator[Callable[[], float]]:
    """Train as ``bench.fidelity`` does, but validate on less: here the times count."""
    data = LANGUAGE.make_data(validation_batches=RANKS)
    held_out = data.validation(rank, world_size)
    module: nn.Module = getattr(model, "module", model)
    batches = (data.batch(_SEED, step, rank) for step in range(LANGUAGE.steps))
    for _ in fit(model, LANGUAGE, LANGUAGE.usual, batches):
        yield lambda: float(module(*held_out))


@dataclass(frozen=True)
class Course:
    """The training with one hook: its losses, and times over links.

    ``row``: its runs and changes against plain averaging. ``measured``: by rate of the link, the
    seconds of the first steps. ``real``: by rate, a whole training over that link.
    """

    row: Row
    measured: Mapping[float, Sequence[tuple[int, float]]]
    real: Mapping[float, Run]

    @property
    def name(self) -> str:
        return self.row.trained.hook

    @cached_property
    def curve(self) -> list[tuple[int, float, float, float]]:
        """The steps, and after them the mean, the least and the largest loss of all seeds."""
        points = zip(*(run.curve for run in self.row.runs), strict=True)
        found = ((of[0][0], [loss for _, _, loss in of]) for of in points)
        return [(int(step), mean(losses), min(losses), max(losses)) for step, losses in found]

    def seconds(self, rate: float, step: int = LANGUAGE.steps) -> float:
        """Return the time of the first steps over a link of this rate."""
        steps, seconds = map(np.array, zip((0, 0.0), *self.measured[rate], strict=True))
        if step <= steps[-1]:
            return float(np.interp(step, steps, seconds))
        settled = np.flatnonzero(steps >= _SETTLED)[0]
        each = (seconds[-1] - seconds[settled]) / (steps[-1] - steps[settled])
        return float(seconds[-1] + each * (step - steps[-1]))


class Courses:
    """The trainings with all hooks that have runs, by name, from the results in a folder.

    ``plain``: that with plain averaging.
    """

    def __init__(self, results: Path) -> None:
        record = Record(newest(results, RUNS))
        self.about = record.about
        times = _step_times(results)
        self.by_hook: dict[str, Course] = {}
        for trained in (TrainedHook(REFERENCE), *trained_on(TASK)):
            if (row := record.row(TASK, trained)) is None:
                continue
            config = row.runs[0].config
            measured = {rate: of[key] for rate, of in times.items() if (key := _key(config)) in of}
            real = {rate: run for rate in RATES for run in record.runs(TASK, trained, rate)}
            self.by_hook[trained.hook] = Course(row, measured, real)
        self.plain = self.by_hook[REFERENCE]

    def arrives(self, course: Course) -> bool:
        """Return whether a hook ends close to plain averaging's loss.

        The learning rate falls to zero with the last step, so all trainings have the same length.
        """
        return course.row.change <= _CLOSE

    def faster(self, course: Course, other: str, rate: float) -> float:
        """Return the time of the training with another hook, divided by that with this one."""
        return self.by_hook[other].seconds(rate) / course.seconds(rate)

    def over(self, rate: float) -> list[Course]:
        """Return the trainings whose times over a link are known, the shortest first."""
        known = [course for course in self.by_hook.values() if rate in course.measured]
        return sorted(known, key=lambda course: course.seconds(rate))

    @property
    def deviations(self) -> dict[tuple[str, float], float]:
        """How much longer real trainings took than the product says, by hook and rate."""
        return {
            (course.name, rate): run.seconds / course.seconds(rate) - 1
            for course in self.by_hook.values()
            for rate, run in course.real.items()
            if run.seconds is not None and rate in course.measured
        }


def _step_times(results: Path) -> dict[float, dict[str, list[tuple[int, float]]]]:
    """Return steps and their seconds by rate of the link and hook, the newest file of each rate."""
    found: dict[float, dict[str, list[tuple[int, float]]]] = {}
    for path in sorted(results.glob(STEPS_OVER_LINKS)):
        new: dict[float, dict[str, list[tuple[int, float]]]] = {}
        for row in json.loads(path.read_text())["rows"]:
            if row["measured"] and row["training"] and row["hook"] != "torch":
                points = [(point["step"], point["seconds"]) for point in row["training"]]
                key = _key(hook_spec(row["hook"]).create().to_config())
                new.setdefault(row["bits_per_second"], {})[key] = points
        found |= new
    return found


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


# ------------------------------------------------------------------------------ what pages quote


def facts(courses: Courses, worst: Mapping[str, float]) -> dict[str, str]:
    """Return the figures by name. Those that are not measured yet say so.

    ``worst``: by hook, the largest change of the loss on the published tasks.
    """
    runs, deviations = courses.plain.row.runs, courses.deviations.values()
    off = f"{percent(min(deviations))} to {percent(max(deviations))}" if deviations else _MISSING
    found = {
        "headline": headline(courses, worst),
        "trainings over links": table(courses),
        "real trainings": real_trainings(courses),
        "real trainings, range": off,
        "language parameters": _parameters(),
        "language seeds": str(len(runs)),
        "language loss": f"{mean(run.loss for run in runs):.3f}",
        "language close": f"{100 * _CLOSE:.0f} %",
        "language machine": "{cpu}, {cores} cores, torch {torch}, Python {python}".format(
            **courses.about
        ),
    }
    for trained in (TrainedHook(REFERENCE), *trained_on(TASK)):
        name, course = trained.hook, courses.by_hook.get(trained.hook)
        found[f"language {name}"] = percent(course.row.change) if course else _MISSING
        for rate in RATES:
            where, to_bf16 = f"{name} over {format_rate(rate)}", _MISSING
            if course is None or rate not in course.measured:
                found[where] = _MISSING
            else:
                found[where] = duration(course.seconds(rate))
                if "bf16" in _others(courses, rate):
                    to_bf16 = times(courses.faster(course, "bf16", rate))
            found[f"{where}, to bf16"] = to_bf16
    return found


def headline(courses: Courses, worst: Mapping[str, float]) -> str:
    """Return the result over the slowest link.

    Of the fastest hook that gets there, of the fastest that loses little, and of ranks alone.
    ``worst``: see :func:`facts`.
    """
    rate = HEADLINE
    hooks = [each for each in courses.over(rate) if each.name not in (REFERENCE, ALONE)]
    safe = [each for each in hooks if worst[each.name] <= _LIMIT]
    limits = ((safe, _CLOSE), (hooks, _FAR))
    fastest = (next((it for it in of if it.row.change <= limit), None) for of, limit in limits)
    named = {each.name: each for each in fastest if each is not None}
    plain, alone = courses.plain, courses.by_hook[ALONE]
    loss = mean(run.loss for run in plain.row.runs)
    sentences = (
        f"A GPT of {_parameters()} parameters, {LANGUAGE.steps:,} steps on {RANKS} ranks over",
        f"{format_rate(rate)}: plain averaging takes {duration(plain.seconds(rate))} to a",
        f"validation loss of {loss:.3f}.",
        *(_sentence(courses, each, worst[each.name]) for each in named.values()),
        f"Ranks that never average (`{ALONE}`) end {_above(alone.row.change)}.",
    )
    text = " ".join(sentences).replace(" %", "\xa0%")  # which are not to be torn apart
    return textwrap.fill(text, 118, break_on_hyphens=False).replace("\xa0", " ")


def _sentence(courses: Courses, course: Course, worst: float) -> str:
    change, low, high = course.row.change, min(course.row.changes), max(course.row.changes)
    seeds = [f"by seed {percent(low)} to {percent(high)}"] if low < high else []
    if courses.arrives(course):
        where, seeds = "at that loss", [percent(change), *seeds]
    else:
        where = _above(change)
    brackets = f" ({'; '.join(seeds)})" if seeds else ""
    elsewhere = f", on another task {_above(worst)}" if worst > _LIMIT else ""
    return (
        f"`{course.name}` takes {duration(course.seconds(HEADLINE))}, "
        f"{_speed_ups(courses, course, HEADLINE)}, and ends {where}{brackets}{elsewhere}."
    )


def table(courses: Courses) -> str:
    """Return the loss of each hook, and the time of its training over each link."""
    rates = [rate for rate in RATES if courses.over(rate)]
    order = sorted(courses.by_hook.values(), key=lambda course: course.row.change)
    return tables.table(
        (
            {
                "hook": f"`{course.row.trained.hook}`",
                "loss at the end": _verdict(courses, course),
                "by seed": _by_seed(courses, course),
                "bytes": f"{100 * course.row.byte_share:.1f} %",
            }
            | {format_rate(rate): _cell(courses, course, rate) for rate in rates}
            for course in order
        ),
        aligned=False,
    )


def real_trainings(courses: Courses) -> str:
    """Return the whole trainings over a link beside the product."""
    rows = [
        {
            "hook": f"`{name}`",
            "link": format_rate(rate),
            "product": duration(courses.by_hook[name].seconds(rate)),
            "real training": duration(courses.by_hook[name].real[rate].seconds),
            "difference": percent(deviation),
        }
        for (name, rate), deviation in courses.deviations.items()
    ]
    return tables.table(rows, aligned=False) if rows else "Not yet measured."


def _parameters() -> str:
    parameters = sum(parameter.numel() for parameter in make_gpt().parameters())
    return f"{parameters / 1e6:.2f} million"


def _verdict(courses: Courses, course: Course) -> str:
    if course is courses.plain:
        return f"{mean(run.loss for run in course.row.runs):.3f}"
    found = percent(course.row.change)
    return found if courses.arrives(course) else f"{found}, does not get there"


def _by_seed(courses: Courses, course: Course) -> str:
    if course is courses.plain:
        return ", ".join(f"{run.loss:.3f}" for run in course.row.runs)
    return ", ".join(map(percent, course.row.changes))


def _cell(courses: Courses, course: Course, rate: float) -> str:
    if rate not in course.measured:
        return ""
    ratios = [times(courses.faster(course, other, rate)) for other in _others(courses, rate)]
    return f"{duration(course.seconds(rate))} ({' / '.join(ratios)})"


def _others(courses: Courses, rate: float) -> list[str]:
    known = {course.name for course in courses.over(rate)}
    return [other for other in (REFERENCE, "bf16") if other in known]


def _speed_ups(courses: Courses, course: Course, rate: float) -> str:
    names = {REFERENCE: "plain averaging", "bf16": "`bf16`"}
    ratios = {
        other: courses.faster(course, other, rate)
        for other in _others(courses, rate)
        if other != course.name
    }
    return " and ".join(
        f"{times(ratio)} times faster than {names[o]}" for o, ratio in ratios.items()
    )


def _above(change: float) -> str:
    return f"{100 * change:.1f} % above"


def percent(change: float) -> str:
    """Return a change with its sign."""
    return f"{100 * change:+z.1f} %"


def times(ratio: float) -> str:
    """Return a ratio of times."""
    return f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def duration(seconds: float | None) -> str:
    """Return seconds as minutes and seconds."""
    minutes, rest = divmod(round(seconds or 0), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
