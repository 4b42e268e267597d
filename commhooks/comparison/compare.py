"""The comparison itself; see :func:`compare`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from commhooks import links as shaped
from commhooks.comparison.contender import BARE, TORCH, Contender, contenders
from commhooks.comparison.machine import check_means, cores, describe_machine
from commhooks.comparison.place import (
    ComparisonError,
    Figures,
    Progress,
    enter_all,
    time_all,
    train_all,
)
from commhooks.comparison.prediction import break_even_rate, predict_step
from commhooks.comparison.result import LOOPBACK, Comparison, Row, TrainingPoint
from commhooks.comparison.ring import Entry
from commhooks.comparison.subject import Subject
from commhooks.comparison.training import load_training_function
from commhooks.hook import tree
from commhooks.hook_spec import HookSpec, parse_hook_spec
from commhooks.ranks import Ranks
from commhooks.rates import format_rate
from commhooks.wire import all_reduce_bytes

__all__ = ["ComparisonError", "compare"]

_BUCKET_BYTES = 25 * 1024**2  # torch's default
_ROUNDINGS = 100  # errors of so many times the precision are taken for rounding

Courses = dict[str, tuple[TrainingPoint, ...]]


def compare(
    model: str,
    hooks: Sequence[str | HookSpec],
    *,
    input: str | None = None,  # noqa: A002
    train: str | None = None,
    world_size: int = 2,
    links: Sequence[float] = (),
    steps: int = 50,
    train_steps: int = 200,
    measure_links: bool = True,
    progress: Progress = lambda *_: None,
) -> Comparison:
    """Measures ``hooks``, torch's own wrapper and the bare model side by side, on this machine.

    Each is verified first: gradients have to be finite, and where a hook is lossless, the exact
    mean. Then they take turns step by step, over loopback and over each link. Where links cannot be
    made, their times are predicted, see :mod:`commhooks.comparison.prediction`. Ranks are processes
    on CPU with the Gloo backend. Hooks are measured as late in training, see
    :data:`commhooks.comparison.bout.FIRST_STEP`; with ``train`` they train from the first step.

    Args:
        model: see :class:`commhooks.comparison.subject.Subject`.
        input: see there.
        hooks: see :mod:`commhooks.hook_spec`.
        train: ``package.module:function``, see :mod:`commhooks.comparison.training`.
        world_size: number of ranks; the rule for the most is in
            :func:`commhooks.comparison.machine.check_means`.
        links: rates in bits per second.
        steps: that are timed, for each contender and link.
        train_steps: for each contender and measured link; over loopback if no link is measured.
        measure_links: False to predict them in any case.
        progress: called with what is being done, how much of it is done, and of how much.

    Raises:
        ModelError, TrainingError, CommHookOptionError, UnknownHookError: before anything starts.
        ComparisonError: numbers make no sense, or there are too many ranks for this machine; a
            contender failed, or a rank died, with what it printed.
    """
    specs = [parse_hook_spec(hook) if isinstance(hook, str) else hook for hook in hooks]
    _check_numbers(specs, world_size, steps, train_steps, links)
    if train is not None:
        load_training_function(train)
    entrants = contenders(specs)
    subject = Subject(model, input)
    gradient_bytes, precision = _size_up(subject, world_size, len(entrants))
    exact = {spec.text for spec in specs if all(hook.lossless for hook in tree(spec.create()))}
    notes = []
    if world_size > cores():
        notes.append(f"{world_size} ranks share {cores()} cores: times are of a crowded machine")
    measured = list(links) if measure_links else []
    if measured and (reason := shaped.unavailable()):
        notes.append(f"links are predicted, not measured: {reason}")
        measured = []
    event = _Event(subject, entrants, world_size, steps, train, train_steps, progress)

    loopback = event.over_loopback(exact | {TORCH.name}, precision, trains=not measured)
    report = _Report(event, loopback, gradient_bytes)
    rows = report.rows(None, loopback)
    for rate in links:
        try:
            there = event.over_link(rate) if rate in measured else None
        except shaped.LinkError as error:
            there = None
            notes.append(f"{format_rate(rate)} is predicted, not measured: {error}")
        rows += report.rows(rate, there)
    return Comparison(model, world_size, steps, describe_machine(), tuple(notes), tuple(rows))


def _check_numbers(
    specs: Sequence[HookSpec],
    world_size: int,
    steps: int,
    train_steps: int,
    links: Sequence[float],
) -> None:
    names = [spec.text for spec in specs]
    for name in names:
        if names.count(name) > 1 or name in (BARE.name, TORCH.name):
            raise ComparisonError(f"hook {name!r} is there twice")
    if not names:
        raise ComparisonError("expected at least one hook to compare")
    for what, number in (("steps", steps), ("training steps", train_steps)):
        if number < 1:
            raise ComparisonError(f"expected at least 1 of {what}, found {number}")
    if world_size < 2:
        raise ComparisonError(f"expected at least 2 ranks, found {world_size}: one has no peer")
    for rate in links:
        if not 0 < rate < math.inf:
            raise ComparisonError(f"expected a rate in bits per second, found {rate}")


def _size_up(subject: Subject, world_size: int, count: int) -> tuple[int, float]:
    """Bytes of the gradients and their relative precision; refuses what does not fit here."""
    module = subject.make_module()
    subject.make_input(module, 0)
    parameters = [p for p in module.parameters() if p.requires_grad]
    parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
    if reason := check_means(world_size, count, parameter_bytes):
        raise ComparisonError(reason)
    precision = max(torch.finfo(parameter.dtype).eps for parameter in parameters)
    return sum(parameter.nbytes for parameter in parameters), precision


@dataclass(frozen=True)
class _Outcome:
    """What was measured at one place, by names of contenders; entries over loopback only."""

    figures: dict[str, Figures]
    courses: Courses
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class _Event:
    """Who meets, and for how long."""

    subject: Subject
    entrants: list[Contender]
    world_size: int
    steps: int
    train: str | None
    train_steps: int
    progress: Progress

    def over_loopback(self, exact: set[str], precision: float, *, trains: bool) -> _Outcome:
        """``exact``: who is held to the exact mean. With the errors of all."""
        with Ranks(self.world_size, threads=self._threads) as ranks:
            tell = self._telling(LOOPBACK)
            entries = enter_all(ranks, self.subject, self.entrants, tell, verify=True)
            _verify(entries, exact, _ROUNDINGS * precision)
            figures = time_all(ranks, self.entrants, self.steps, tell)
            courses = self._courses(ranks, tell) if trains else {}
        return _Outcome(figures, courses, entries)

    def over_link(self, rate: float) -> _Outcome:
        """Raises LinkError where it cannot be made."""
        with (
            shaped.shaped_link(self.world_size, rate) as link,
            Ranks(self.world_size, link, threads=self._threads) as ranks,
        ):
            tell = self._telling(format_rate(rate))
            enter_all(ranks, self.subject, self.entrants, tell, verify=False)
            figures = time_all(ranks, self.entrants, self.steps, tell)
            return _Outcome(figures, self._courses(ranks, tell))

    def _courses(self, ranks: Ranks, tell: Progress) -> Courses:
        if self.train is None:
            return {}
        who = [entrant for entrant in self.entrants if entrant != BARE]
        return train_all(ranks, who, self.train, self.train_steps, tell)

    def _telling(self, where: str) -> Progress:
        return lambda what, done, of: self.progress(f"{where}: {what}", done, of)

    @property
    def _threads(self) -> int:
        return max(1, cores() // self.world_size)


def _verify(entries: dict[str, Entry], exact: set[str], rounding: float) -> None:
    for name, entry in entries.items():
        error = entry.error
        if error is None:
            continue
        if not math.isfinite(error):
            raise ComparisonError(
                f"{name!r}: the gradients of a step are not finite, or their mean is zero or not "
                "finite; nothing was timed"
            )
        if name in exact and error > rounding:
            raise ComparisonError(
                f"{name!r}: expected the exact mean to within rounding ({rounding:.1e}), found "
                f"gradients that are off by {error:.1e}; nothing was timed. Is the model's "
                "gradient the same in each run with the same torch.manual_seed()?"
            )


@dataclass(frozen=True)
class _Report:
    """Makes rows of what was measured."""

    event: _Event
    loopback: _Outcome
    gradient_bytes: int

    def rows(self, rate: float | None, there: _Outcome | None) -> list[Row]:
        """Of one place; None for loopback's rate, and for an outcome that is to be predicted."""
        names = [entrant.name for entrant in self.event.entrants]
        steps = {
            name: there.figures[name].step_seconds if there else self._predicted(name, rate)
            for name in names
        }
        return [self._row(name, rate, there, steps) for name in names]

    def _row(
        self, name: str, rate: float | None, there: _Outcome | None, steps: dict[str, float]
    ) -> Row:
        local = self.loopback.figures[name]
        figures = there.figures[name] if there else None
        wire_bytes = (figures or local).costs.wire_bytes
        bare = self.loopback.figures[BARE.name].step_seconds
        return Row(
            hook=name,
            link=LOOPBACK if rate is None else format_rate(rate),
            bits_per_second=rate,
            measured=figures is not None,
            step_seconds=steps[name],
            step_spread_seconds=figures.step_spread_seconds if figures else None,
            to_torch=steps[name] / steps[TORCH.name],
            exposed_seconds=figures.exposed_seconds if figures else steps[name] - bare,
            waited_seconds=figures.costs.exposed_seconds if figures else None,
            floor_seconds=None if rate is None else 8 * wire_bytes / rate + bare,
            predicted_seconds=None if rate is None else self._predicted(name, rate),
            gradient_bytes=self.gradient_bytes,
            wire_bytes=wire_bytes,
            ratio=self._plain_bytes / wire_bytes if wire_bytes else None,
            error=self.loopback.entries[name].error,
            peak_bytes=self.loopback.entries[name].peak_bytes,
            break_even_bits_per_second=self._break_even(name),
            training=self._course(name, there, steps[name]),
        )

    @property
    def _plain_bytes(self) -> int:
        return all_reduce_bytes(self.gradient_bytes, self.event.world_size)

    def _predicted(self, name: str, rate: float | None) -> float:
        assert rate is not None
        figures = self.loopback.figures[name]
        return predict_step(
            forward_seconds=figures.forward_seconds,
            step_seconds=figures.step_seconds,
            wire_bytes=figures.costs.wire_bytes,
            buckets=figures.costs.buckets or 1 + self.gradient_bytes // _BUCKET_BYTES,
            bits_per_second=rate,
        )

    def _break_even(self, name: str) -> float | None:
        if name in (BARE.name, TORCH.name):
            return None
        hook, plain = self.loopback.figures[name], self.loopback.figures[TORCH.name]
        return break_even_rate(
            step_seconds=hook.step_seconds,
            wire_bytes=hook.costs.wire_bytes,
            plain_seconds=plain.step_seconds,
            plain_bytes=self._plain_bytes,
        )

    def _course(
        self, name: str, there: _Outcome | None, step_seconds: float
    ) -> tuple[TrainingPoint, ...]:
        """Loss and bytes do not depend on the link; predicted seconds are those of all steps."""
        if there is not None:
            return there.courses.get(name, ())
        points = self.loopback.courses.get(name, ())
        return tuple(replace(point, seconds=point.step * step_seconds) for point in points)
