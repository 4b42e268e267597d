"""Options and output that several commands share."""

import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from commhooks.cluster import CPU, Device
from commhooks.costs.backends import NCCL, Backend, Gloo
from commhooks.costs.network import Link, Network
from commhooks.costs.units import format_duration, format_rate, parse_duration, parse_rate
from commhooks.errors import CommHookError, reason_of
from commhooks.hook.base import CommHook
from commhooks.hook.references import import_module
from commhooks.hook.spec import HookSpec, hook_spec, parse_hook_specs, split_hook_specs
from commhooks.lab.machine import cores as cores_here
from commhooks.lab.models import built_in_models, load_callable
from commhooks.lab.simulation import Job

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """A type of option. ``parse`` raises CommHookError or ValueError for a wrong text."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # a default
        try:
            return self._parse(value)
        except (CommHookError, ValueError) as error:
            self.fail(str(error), param, ctx)


class _File(click.Path):
    """A file to write. A path that cannot be written is an error before anything is measured."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"cannot write {str(path)!r}", param, ctx)
        return path


class _Image(_File):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from matplotlib.figure import Figure  # takes a second to import

        path = super().convert(value, param, ctx)
        known = Figure().canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in known:
            endings = ", ".join(known)
            self.fail(f"{str(path)!r}: expected a name that ends with one of {endings}", param, ctx)
        return path


FILE = _File(dir_okay=False, writable=True)
"""A path that can be written to."""
IMAGE = _Image(dir_okay=False, writable=True)
"""A path that can be written to, with an extension that matplotlib can draw."""
RATE = Parsed("rate", parse_rate)
"""``1gbit`` -> bits per second."""
DURATION = Parsed("duration", parse_duration)
"""``20us`` -> seconds."""
DEVICE: Mapping[str, Any] = {
    "type": Parsed("cpu|cuda", Device.choose),
    "callback": lambda _context, _option, found: Device.choose(found),
    "help": "What to measure on. Default: cuda, where torch finds a CUDA device, else cpu.",
}
"""The attributes of ``--device``, whose value is a :class:`commhooks.cluster.Device`."""
_POSITIVE = click.FloatRange(min=0, min_open=True)

import_option = click.option(
    "--import",
    metavar="MODULE",
    multiple=True,
    is_eager=True,
    expose_value=False,
    callback=lambda _context, _option, names: [import_module(name) for name in names],
    help="Import a module, or a file such as my_hooks.py, that registers hooks; may be given "
    "several times.",
)


def model_options(command: _Function) -> _Function:
    """Add options for a model, its input and its wrapper, and for the modules that they need."""
    model = click.option(
        "--model",
        required=True,
        metavar="NAME",
        help="The model: package.module:factory, a function in a file as train.py:make_model, or "
        f"one of {', '.join(built_in_models())}.",
    )
    input_factory = click.option(
        "--input",
        "input_factory",
        metavar="NAME",
        help="package.module:factory or file.py:factory of a batch. Default: the model's "
        "example_input().",
    )
    unused = click.option(
        "--find-unused-parameters",
        "wrapper",
        is_flag=True,
        callback=lambda _context, _option, given: {"find_unused_parameters": True} if given else {},
        help="For a model that does not use all of its parameters in each step.",
    )
    return model(input_factory(unused(import_option(command))))


def hooks_option(
    text: str, *, name: str = "--hooks", required: bool = True
) -> Callable[[_Function], _Function]:
    """Make an option as ``--hooks bf16,powersgd:rank=4``, which may be given several times.

    Its value is a list of texts, which may name hooks that cannot be made.
    """
    return click.option(
        name,
        name.removesuffix("s"),
        type=Parsed("hook,hook...", split_hook_specs),
        multiple=True,
        required=required,
        callback=lambda _context, _option, given: [text for texts in given for text in texts],
        help=text,
    )


def _option(**attributes: Any) -> Any:
    return field(metadata=attributes)


@dataclass(frozen=True)
class TargetCluster:
    """A cluster, and how a model is trained on it. See :func:`cluster_options`."""

    device: Device = field(metadata=DEVICE)
    world_size: int = _option(type=click.IntRange(min=2), required=True, help="Number of ranks.")
    link: float = _option(
        type=RATE,
        required=True,
        help="Rate of each node's link to the network, for example 25gbit.",
    )
    latency: float = _option(
        type=DURATION, default="20us", show_default=True, help="Latency of the network, one way."
    )
    ranks_per_node: int = _option(
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Ranks on each node; they share its link.",
    )
    node_link: float | None = _option(
        type=RATE, help="Rate of each rank's link inside its node. Default: the rate of --link."
    )
    backend: str = _option(
        type=click.Choice([Gloo.name, NCCL.name]),
        help="Library of collectives on the cluster. Default: that of the device.",
    )
    cores: float | None = _option(
        type=_POSITIVE,
        help="CPU cores of each node, which its ranks share. Default: as many as this machine has, "
        "but at least one per rank; without limit with --step-time or on a GPU.",
    )
    step_time: float | None = _option(
        type=DURATION,
        help="Forward and backward of one rank alone on the cluster, for example 350ms; sets "
        "--speed.",
    )
    speed: float | None = _option(
        type=_POSITIVE,
        help="How many times as fast as this machine the ranks compute. Default: 1.",
    )
    bucket_cap_mb: float | None = _option(
        type=_POSITIVE,
        help="Size of gradient buckets in MiB. Default: that of DistributedDataParallel.",
    )

    def __post_init__(self) -> None:
        if not self.backend:
            object.__setattr__(self, "backend", self.device.backend)
        if self.speed is not None and self.step_time is not None:
            raise click.UsageError("--speed and --step-time say the same; expected one of them")
        if self.step_time == 0:
            raise click.UsageError("--step-time: expected more than 0 s")

    @property
    def network(self) -> Network:
        """The links between ranks."""
        node_link = Link(self.node_link or self.link, latency_seconds=0)
        return Network(
            self.world_size, Link(self.link, self.latency), node_link, self.ranks_per_node
        )

    def job(
        self, model: str, input_factory: str | None, wrapper: Mapping[str, Any], **options: Any
    ) -> Job:
        """Return the job of measuring here for the cluster."""
        return Job(
            model,
            input_factory,
            tuple(wrapper.items()),
            device=self.device,
            ranks_per_node=self.ranks_per_node,
            bucket_cap_mb=self.bucket_cap_mb,
            **options,
        )

    def costs(self, gloo: Gloo) -> Backend:
        """Return the costs of the backend, which are ``gloo`` if that is Gloo."""
        return gloo if self.backend == gloo.name else NCCL()

    @property
    def cores_of_rank(self) -> float:
        """The cores that the threads of one rank share."""
        if self.cores is None and (self.step_time is not None or self.device != CPU):
            return math.inf
        cores = self.cores or max(cores_here(), self.ranks_per_node)
        return cores / self.ranks_per_node

    def speed_for(self, alone_seconds: float) -> float:
        """Return the speed, if this machine takes ``alone_seconds`` for a step of one rank."""
        return alone_seconds / self.step_time if self.step_time else self.speed or 1.0

    def title(self, model: str, speed: float) -> str:
        """Return a description of the prediction, in two lines."""
        each = self.cores_of_rank
        cores = "unlimited cores" if math.isinf(each) else f"{each:g} core{'s' * (each != 1)}"
        relative = (
            "at the speed of this machine" if speed == 1 else f"{speed:.3g} times as fast as here"
        )
        return (
            f"{model}, {self.world_size} ranks at {format_rate(self.link)}, "
            f"{format_duration(self.latency)}; predicted "
            f"from a run on {self.device}\n"
            f"for {self.backend}, {cores} per rank, {relative}"
        )


def cluster_options(command: _Function) -> Callable[..., Any]:
    """Add an option for each field of :class:`TargetCluster`; they arrive as ``cluster``."""

    @functools.wraps(command)
    def with_cluster(**options: Any) -> Any:
        cluster = TargetCluster(
            **{each.name: options.pop(each.name) for each in fields(TargetCluster)}
        )
        return command(cluster=cluster, **options)

    found: Callable[..., Any] = with_cluster
    for each in reversed(fields(TargetCluster)):
        found = click.option(f"--{each.name.replace('_', '-')}", **each.metadata)(found)
    return found


def usable_hooks(
    texts: Iterable[str],
    model: str,
    backend: str,
    *references: str,
    check: Callable[[CommHook], None] = lambda _: None,
) -> tuple[list[HookSpec], dict[str, str]]:
    """Return the hooks that can be used on a backend, and by text why others cannot.

    The ``references``, with which they are compared, come first. The module of the model may
    register hooks. ``check`` raises CommHookError for other reasons. Raises CommHookError if no
    hook is left.
    """
    if ":" in model:
        load_callable(model)
    specs, reasons = parse_hook_specs(texts)
    for spec in specs:
        hook = spec.create()
        try:
            check(hook)
        except CommHookError as error:
            reasons[spec.text] = reason_of(error)
        if backend not in hook.backends:
            reasons[spec.text] = f"supports {', '.join(hook.backends)}; found --backend {backend}"
    usable = {spec.text: spec for spec in specs if spec.text not in reasons}
    if reasons and not usable:
        raise CommHookError("; ".join(f"{text}: {reason}" for text, reason in reasons.items()))
    return list(({name: hook_spec(name) for name in references} | usable).values()), reasons


def show_failures(
    reasons: Mapping[str, str], unwritten: str = "", *, is_error: bool = True
) -> None:
    """Print a line for each hook that failed. Exit with status 1 if there is one, and an error.

    Exit with status 1 also for what :func:`write_files` returned.
    """
    for hook, reason in reasons.items():
        click.echo(f"{click.style('Failed:', fg='red', bold=True)} {hook}: {reason}")
    if unwritten:
        raise click.ClickException(unwritten)
    if reasons and is_error:
        sys.exit(1)


def write_files(*files: tuple[Path | None, Callable[[Path], object]]) -> str:
    """Write each file that was asked for with its function; return which ones failed, and why.

    To be called before anything is printed, which a pipe that closes would end.
    """
    failed = []
    for path, write in files:
        try:
            if path is not None:
                write(path)
        except Exception as error:  # of matplotlib, whatever it is: what was measured is not lost
            failed.append(f"{path} was not written: {error}")
    return "; ".join(failed)


def draw(function: str, *arguments: Any) -> Callable[[Path], None]:
    """Return what draws to a file, with a function of plots.py."""

    def write(path: Path) -> None:
        from commhooks.cli import plots  # takes a second to import

        getattr(plots, function)(*arguments, path)

    return write
