"""Types of options that several commands take."""

from typing import Any

import click

from commhooks.errors import CommHookError
from commhooks.hook_spec import HookSpec, parse_hook_spec, parse_hook_specs
from commhooks.rates import parse_rate

__all__ = ["HOOK", "HOOKS", "RATE"]


class _Hook(click.ParamType):  # type: ignore[type-arg]
    name = "hook"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, HookSpec):
            return value
        try:
            return parse_hook_spec(value)
        except CommHookError as error:
            self.fail(str(error), param, ctx)


class _Hooks(click.ParamType):  # type: ignore[type-arg]
    name = "hook,hook..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_hook_specs(value)
        except CommHookError as error:
            self.fail(str(error), param, ctx)


class _Rate(click.ParamType):  # type: ignore[type-arg]
    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, float):
            return value
        try:
            return parse_rate(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


HOOK = _Hook()
"""``powersgd:rank=4`` -> :class:`HookSpec`."""
HOOKS = _Hooks()
"""``bf16,powersgd:rank=4`` -> list of :class:`HookSpec`."""
RATE = _Rate()
"""``1gbit`` -> bits per second."""
