"""Options, and types of options, that several commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from commhooks.errors import CommHookError
from commhooks.hook.spec import parse_hook_specs
from commhooks.lab.models import built_in_models
from commhooks.lab.units import parse_duration, parse_rate

__all__ = [
    "DURATION",
    "FILE",
    "IMAGE",
    "RATE",
    "hooks_option",
    "input_option",
    "model_option",
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


def hooks_option(text: str) -> Callable[[_Function], _Function]:
    """Make the option ``--hooks bf16,powersgd:rank=4``, which may be given several times.

    Its value is a list of :class:`HookSpec`.
    """
    return click.option(
        "--hooks",
        "--hook",
        type=_Parsed("hook,hook...", parse_hook_specs),
        multiple=True,
        required=True,
        callback=lambda _context, _option, given: [spec for specs in given for spec in specs],
        help=text,
    )
