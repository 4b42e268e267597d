"""Types of options that several commands take."""

from collections.abc import Callable
from typing import Any

import click

from commhooks.errors import CommHookError
from commhooks.hook_spec import parse_hook_spec, parse_hook_specs
from commhooks.rates import parse_rate

__all__ = ["HOOK", "HOOKS", "RATE"]


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


HOOK = _Parsed("hook", parse_hook_spec)
"""``powersgd:rank=4`` -> :class:`HookSpec`."""
HOOKS = _Parsed("hook,hook...", parse_hook_specs)
"""``bf16,powersgd:rank=4`` -> list of :class:`HookSpec`."""
RATE = _Parsed("rate", parse_rate)
"""``1gbit`` -> bits per second."""
