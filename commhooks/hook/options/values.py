"""Walk through option values: convert them to JSON's types, and find the hooks in them."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

__all__ = ["instances_in", "to_json"]

Instance = TypeVar("Instance")


def to_json(value: Any) -> Any:
    """Return an option's value in JSON's types, which the option accepts in place of the value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_config"):
        return value.to_config()
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def instances_in(
    value: Any, kind: type[Instance], path: str = ""
) -> Iterator[tuple[str, Instance]]:
    """Yield the instances of ``kind`` in a value with their paths: "inner", "stages.1.1"."""
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from instances_in(item, kind, f"{path}.{key}" if path else str(key))
