"""Options, and types of options, that several commands share."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from commhooks.errors import CommHookError, reason_of
from commhooks.hook.base import CommHook
from commhooks.hook.spec import HookSpec, parse_hook_specs, split_hook_specs
from commhooks.lab.machine import cores as cores_here
from commhooks.lab.models import built_in_models, load_callable
from commhooks.lab.simulation import Link, Network
from commhooks.lab.units import parse_duration, parse_rate

__all__ = [
    "DURATION",
    "FILE",
    "IMAGE",
    "RATE",
    "cluster_options",
    "cores_of_rank",
    "hooks_option",
    "input_option",
    "model_option",
    "network_of",
    "usable_hooks",
]


_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Parsed(click.ParamType):  # type: ignore[type-arg]
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
RATE = _Parsed("rate", parse_rate)
"""``1gbit`` -> bits per second."""
DURATION = _Parsed("duration", parse_duration)
"""``20us`` -> seconds."""

model_option = click.option(
    "--model",
    required=True,
    metavar="NAME",
    help=f"The model: package.module:factory, or one of {', '.join(built_in_models())}.",
)
input_option = click.option(
    "--input",
    "input_factory",
    metavar="NAME",
    help="package.module:factory of a batch. Default: the model's example_input().",
)


def hooks_option(
    text: str, *, name: str = "--hooks", required: bool = True
) -> Callable[[_Function], _Function]:
    """Make an option as ``--hooks bf16,powersgd:rank=4``, which may be given several times.

    Its value is a list of texts, which may name hooks that cannot be made.
    """
    return click.option(
        name,
        name.removesuffix("s"),
        type=_Parsed("hook,hook...", split_hook_specs),
        multiple=True,
        required=required,
        callback=lambda _context, _option, given: [text for texts in given for text in texts],
        help=text,
    )


_CLUSTER = (
    click.option(
        "--world-size", type=click.IntRange(min=2), required=True, help="Number of ranks."
    ),
    click.option(
        "--link",
        type=RATE,
        required=True,
        help="Rate of each node's link to the network, for example 25gbit.",
    ),
    click.option(
        "--latency",
        type=DURATION,
        default="20us",
        show_default=True,
        help="Latency of the network, one way.",
    ),
    click.option(
        "--ranks-per-node",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Ranks on each node; they share its link.",
    ),
    click.option(
        "--node-link",
        type=RATE,
        help="Rate of each rank's link inside its node. Default: the rate of --link.",
    ),
    click.option(
        "--backend",
        type=click.Choice(["gloo", "nccl"]),
        default="gloo",
        show_default=True,
        help="Library of collectives on the cluster.",
    ),
    click.option(
        "--cores",
        type=click.FloatRange(min=0, min_open=True),
        help="CPU cores of each node, which its ranks share. Default: as many as this machine has, "
        "but at least one per rank.",
    ),
    click.option(
        "--speed",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        show_default=True,
        help="How many times as fast as this machine the ranks compute.",
    ),
    click.option(
        "--bucket-cap-mb",
        type=click.FloatRange(min=0, min_open=True),
        help="Size of gradient buckets in MiB. Default: that of DistributedDataParallel.",
    ),
)


def cluster_options(command: _Function) -> _Function:
    """Add the options that describe a cluster, and how the model is trained on it."""
    for option in reversed(_CLUSTER):
        command = option(command)
    return command


def network_of(
    world_size: int, link: float, latency: float, ranks_per_node: int, node_link: float | None
) -> Network:
    """Return the network that :func:`cluster_options` describe."""
    return Network(
        world_size, Link(link, latency), Link(node_link or link, latency_seconds=0), ranks_per_node
    )


def cores_of_rank(cores: float | None, ranks_per_node: int) -> float:
    """Return the cores that the threads of one rank share."""
    return (cores or max(cores_here(), ranks_per_node)) / ranks_per_node


def usable_hooks(
    texts: Iterable[str],
    model: str,
    backend: str,
    check: Callable[[CommHook], None] = lambda _: None,
) -> tuple[list[HookSpec], dict[str, str]]:
    """Return the hooks that can be used on a backend, and by text why others cannot.

    The module of the model may register hooks. ``check`` raises CommHookError for other reasons.
    Raises CommHookError if no hook is left.
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
    usable = [spec for spec in specs if spec.text not in reasons]
    if reasons and not usable:
        raise CommHookError("; ".join(f"{text}: {reason}" for text, reason in reasons.items()))
    return usable, reasons
