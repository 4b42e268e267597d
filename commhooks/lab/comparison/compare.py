"""The comparison itself; see :func:`compare`."""

import math
from collections.abc import Sequence

import torch

from commhooks.cluster import links as shaped
from commhooks.errors import CommHookError
from commhooks.hook.base import tree
from commhooks.hook.spec import HookSpec, parse_hook_spec
from commhooks.lab.comparison.entry import BARE, TORCH, contenders
from commhooks.lab.comparison.experiment import Event
from commhooks.lab.comparison.limits import check_means
from commhooks.lab.comparison.report import Report
from commhooks.lab.comparison.result import Comparison
from commhooks.lab.comparison.setting import ComparisonError, Progress
from commhooks.lab.comparison.training import load_training_function
from commhooks.lab.machine import cores, describe_machine
from commhooks.lab.models import Subject
from commhooks.lab.units import format_rate

__all__ = ["ComparisonError", "compare"]


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
    mean. Then they take turns step by step, over loopback and over each link. What cannot be
    measured is predicted, see :mod:`commhooks.lab.comparison.prediction`: links that cannot be
    made,
    and below which rate a hook pays. Ranks are processes on CPU with the Gloo backend. Hooks are
    measured as late in training, see :data:`commhooks.lab.comparison.trial.FIRST_STEP`; with
    ``train``
    they train from the first step.

    Args:
        model: see :class:`commhooks.lab.models.Subject`.
        input: see there.
        hooks: see :mod:`commhooks.hook.spec`.
        train: ``package.module:function``, see :mod:`commhooks.lab.comparison.training`.
        world_size: number of ranks; the rule for the most is in
            :func:`commhooks.lab.comparison.limits.check_means`.
        links: rates in bits per second.
        steps: that are timed, for each contender and link.
        train_steps: for each contender and measured link; over loopback if no link is measured.
        measure_links: False to predict them in any case.
        progress: called with what is being done, how much of it is done, and of how much.

    Raises:
        ModelError, TrainingError, CommHookOptionError, UnknownHookError: before anything starts.
        ComparisonError: numbers make no sense, or there are too many ranks for this machine; a
            contender failed, or a rank died, with what it printed; or a link can be neither made
            nor predicted.
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
    event = Event(subject, entrants, world_size, steps, train, train_steps, progress)

    loopback = event.over_loopback(exact | {TORCH.name}, precision, trains=not measured)
    if isinstance(loopback.rehearsed, CommHookError):
        notes.append(f"nothing is predicted: {loopback.rehearsed}")
    report = Report(event, loopback, gradient_bytes)
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
