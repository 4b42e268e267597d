"""The comparison itself, see :func:`compare`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from commhooks.cluster import Device, LaunchedRanks
from commhooks.cluster import links as shaped
from commhooks.comm.wire import all_reduce_bytes
from commhooks.costs.units import format_rate
from commhooks.hook.spec import HookLike, hook_spec, parse_hook_specs
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.experiment import Conditions, Experiment, ProgressCallback, Setting
from commhooks.lab.comparison.rank_side import load_training_function
from commhooks.lab.comparison.result import (
    Comparison,
    ComparisonError,
    ComparisonInterrupted,
    Failure,
    Figures,
    Row,
)
from commhooks.lab.machine import check_model, cores, describe_machine
from commhooks.lab.models import Workload, name_of
from commhooks.lab.simulation import BreakEvenRates
from commhooks.lab.simulation.dry_run import check_kernels
from commhooks.lab.verdict import FALLBACK


def compare(
    model: str | Callable[..., nn.Module],
    hooks: Sequence[HookLike | Entry],
    *,
    input: str | Callable[..., Any] | None = None,  # noqa: A002
    train: str | Callable[..., Any] | None = None,
    world_size: int = 2,
    links: Sequence[float] = (),
    steps: int = 50,
    train_steps: int = 200,
    timeout: float = 600.0,
    measure_links: bool = True,
    device: Device | str | None = None,
    wrapper: Mapping[str, Any] | None = None,
    ranks: LaunchedRanks | None = None,
    progress: ProgressCallback = lambda *_: None,
) -> Comparison:
    """Measure ``hooks``, bf16, torch DDP and the bare model side by side on this machine.

    docs/comparing.md says how, and what the figures mean. A hook that cannot be made, fails,
    diverges, ends its process or does not finish is left out from there on, and is one of the
    ``failures`` of the result. The others go on in new processes.

    Args:
        model: the name of a model, or a function of a module that makes one, see
            :class:`commhooks.lab.models.Workload`.
        hooks: texts as :mod:`commhooks.hook.spec` describes them, hooks or their classes, configs,
            or pairs of a name and a dict of options. Rank processes make hooks of their own. An
            :class:`commhooks.lab.comparison.entry.Entry` is another way to average, which comes
            before them and is not predicted.
        input: a function that returns a batch, or its name; None for the model's own input.
        train: a function or its name, see Note [Training functions] in rank_side.py.
        world_size: number of ranks.
        links: rates in bits per second.
        steps: number of timed steps for each entry and link.
        train_steps: number of training steps, likewise.
        timeout: seconds after which a hook has failed that does not finish its steps, which are at
            most 53 at a time.
        measure_links: False to predict all links.
        device: "cpu" or "cuda"; None for CUDA where torch finds a device.
        wrapper: options of the wrappers, such as ``{"find_unused_parameters": True}``.
        ranks: the ranks that torchrun started; all of them call this with the same arguments. Their
            own network is measured, nothing is predicted, and ``world_size`` and ``device`` are
            theirs. None starts processes on this machine.
        progress: called with a description of the current work, the steps so far, and all steps.

    Raises:
        DeviceError, ModelError, TrainingError: before anything starts.
        CommHookOptionError, UnknownHookError: none of the hooks can be made.
        CommHookError: a hook needs CuPy on this device, and it cannot be used.
        LimitError: there are too many ranks for this machine.
        ComparisonError: a number makes no sense, the bare model or torch DDP fails, or a link can
            be neither made nor predicted.
        ComparisonInterrupted: Ctrl-C; contains what has been measured so far.
    """
    start = time.monotonic()
    if ranks is not None:
        world_size, device = ranks.world_size, ranks.device
        if links:
            raise ComparisonError("expected no links for ranks on hosts, which have their own")
    links = tuple(dict.fromkeys(links))
    conditions = Conditions(
        Workload(model, input, tuple((wrapper or {}).items()), device=Device.choose(device)),
        world_size,
        steps,
        links,
        None if train is None else name_of(train),
        train_steps,
        timeout,
        progress,
    )
    if conditions.train is not None:
        load_training_function(conditions.train)
    here = world_size if ranks is None else ranks.local_world_size
    size = check_model(conditions.workload, here)
    own = [each for each in hooks if isinstance(each, Entry)]
    named = [each for each in hooks if not isinstance(each, Entry)]
    specs, reasons = parse_hook_specs(named)  # the module of the model may register hooks
    if not specs:
        raise ComparisonError("expected at least one hook to compare")
    names = [spec.text for spec in specs]
    for name in (BARE.name, TORCH.name):
        if name in names:
            raise ComparisonError(f"hook {name!r} has the name of a baseline; rename it")
    if FALLBACK not in names:
        specs.insert(0, hook_spec(FALLBACK))
    check_kernels(specs, conditions.workload.device)
    notes = []
    if ranks is None and world_size > cores():
        notes.append(
            f"{world_size} ranks share {cores()} cores, so they wait for each other's computation"
        )
    measured = list(links) if measure_links else []
    if measured and (reason := shaped.unavailable()):
        notes.append(f"links are predicted, not measured: {reason}")
        measured = []
    experiment = Experiment(
        conditions,
        size,
        [BARE, TORCH, *own, *map(Entry.of, specs)],
        notes=notes,
        failures=[Failure(text, None, reason) for text, reason in reasons.items()],
    )
    try:
        if ranks is None:
            experiment.run(measured)
        else:
            experiment.run_on_hosts(ranks)
    except KeyboardInterrupt:
        notes.append("interrupted: the figures are those of the steps before")
        found = result_of(experiment, links)
        if not found.rows:
            raise
        raise ComparisonInterrupted(found) from None
    found = result_of(experiment, links, complete=True)
    return replace(found, measuring_seconds=time.monotonic() - start)


def result_of(
    experiment: Experiment, links: Sequence[float] = (), *, complete: bool = False
) -> Comparison:
    """Return the result of the first setting and of links, predicted if not measured.

    Unless ``complete``, links that can be neither measured nor predicted are left out.
    """
    conditions, study = experiment.conditions, experiment.study
    first, *others = experiment.settings or [Setting("nothing")]
    local = experiment.figures(first)
    nbytes = experiment.model.gradient_bytes
    plain_bytes = all_reduce_bytes(nbytes, conditions.world_size)
    break_even = {}
    if study is not None:
        never = BreakEvenRates(0.0, 0.0)
        hooks = study.hooks.keys() - {TORCH.name}
        break_even = {name: study.break_even(name) or never for name in hooks}

    def predicted(name: str, rate: float) -> float:
        if study is None:
            raise ComparisonError(
                f"{format_rate(rate)} can be neither measured nor predicted: {experiment.no_study}"
            )
        return local[name].step_seconds if name == BARE.name else study.step_seconds(name, rate)

    rows, failures = list[Row](), list(experiment.failures)
    measured = {setting.bits_per_second: setting for setting in others}
    for rate in (None, *links) if TORCH.name in local else ():  # not if interrupted before
        over = first if rate is None else measured.get(rate, Setting(format_rate(rate), rate))
        figures, training = experiment.figures(over), over.training
        bare, is_measured = local[BARE.name].step_seconds, TORCH.name in figures
        if not is_measured:
            if rate is None or not (complete or study is not None):
                continue
            failed = {failure.hook for failure in failures}
            left_out = failed | experiment.unpredicted.keys()
            names = [entry.name for entry in experiment.entries if entry.name not in left_out]
            seconds = {name: predicted(name, rate) for name in names}
            figures = {
                name: Figures(
                    step_seconds=seconds[name],
                    exposed_seconds=seconds[name] - bare,
                    wire_bytes=local[name].wire_bytes,
                )
                for name in names
            }
            training = {  # of the first setting, at the predicted times
                name: [replace(point, seconds=point.step * seconds[name]) for point in points]
                for name, points in first.training.items()
                if name in seconds
            }
            failures += (
                Failure(name, over.name, reason)
                for name, reason in experiment.unpredicted.items()
                if name not in failed
            )
        for name, found in figures.items():
            bits, sent = over.bits_per_second, local[name].wire_bytes
            rates = break_even.get(name)
            is_simulated = study is not None and name in {BARE.name, *study.hooks}
            row = Row(
                **vars(found) | {"wire_bytes": sent},
                hook=name,
                link=over.name,
                bits_per_second=bits,
                measured=is_measured,
                to_torch=found.step_seconds / figures[TORCH.name].step_seconds,
                floor_seconds=8 * sent / bits + bare if bits else None,
                predicted_seconds=predicted(name, bits) if bits and is_simulated else None,
                gradient_bytes=nbytes,
                ratio=plain_bytes / sent if sent else None,
                error=first.first_steps[name].error,
                peak_bytes=first.first_steps[name].peak_bytes,
                break_even_bits_per_second=rates.below if rates else None,
                break_even_above_bits_per_second=rates.above if rates else 0.0,
                training=tuple(training.get(name, ())),
            )
            rows.append(row)
    return Comparison(
        str(conditions.workload.model),
        conditions.world_size,
        conditions.steps,
        describe_machine(conditions.workload.device),
        tuple(experiment.notes),
        tuple(rows),
        tuple(experiment.pairs),
        tuple(failures),
        alone_seconds=experiment.alone_seconds,
    )
