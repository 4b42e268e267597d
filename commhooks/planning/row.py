"""The hook of one group of parameters, and of several equal ones."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Row", "label_of", "merged"]


@dataclass(frozen=True)
class Row:
    """The hook of one group of parameters."""

    names: tuple[str, ...]
    label: str
    bucket: int
    hook: str
    """A spec as on the command line."""
    elements: int
    wire_bytes: float
    """Sent by rank 0 for this group in each step."""
    error: float
    """|average - exact| / |exact| of the group, when it was measured."""
    norm: float
    """Of the average gradient of the group."""
    hidden_seconds: float
    """The part of the group's communication that backward hides, an estimate."""
    exposed_seconds: float
    """The part that the step waits for, an estimate."""
    why: str


def label_of(names: Sequence[str]) -> str:
    """Return the name of the first parameter, and how many there are.

    Numbers that differ are asterisks, "h.*.mlp.weight x12", and three dots stand for other names.
    """
    if len(names) == 1:
        return names[0]
    others = " ..." if len({_pattern(name) for name in names}) > 1 else ""
    return f"{_pattern(names[0])}{others} \N{MULTIPLICATION SIGN}{len(names)}"


def merged(rows: Sequence[Row]) -> list[Row]:
    """Return one row for rows whose parameters differ in the numbers of their names only.

    They have the same hook and as many elements. What they send and take is summed up.
    """
    alike: dict[object, list[Row]] = {}
    for row in rows:
        key = (tuple(_pattern(name) for name in row.names), row.hook, row.elements)
        alike.setdefault(key, []).append(row)
    return [_one(each) if len(each) > 1 else each[0] for each in alike.values()]


def _one(rows: Sequence[Row]) -> Row:
    names = tuple(name for row in rows for name in row.names)
    norm = math.sqrt(math.fsum(row.norm**2 for row in rows))
    wrong = math.sqrt(math.fsum((row.error * row.norm) ** 2 for row in rows))
    return replace(
        rows[0],
        names=names,
        label=label_of(names),
        elements=sum(row.elements for row in rows),
        wire_bytes=math.fsum(row.wire_bytes for row in rows),
        error=wrong / norm if norm else max(row.error for row in rows),
        norm=norm,
        hidden_seconds=math.fsum(row.hidden_seconds for row in rows),
        exposed_seconds=math.fsum(row.exposed_seconds for row in rows),
        why=Counter(row.why for row in rows).most_common(1)[0][0],
    )


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)
