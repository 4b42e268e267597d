"""A hook for each parameter and the time that this saves: the output of the solver."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from commhooks.costs.timeline import Timing
from commhooks.costs.units import aligned
from commhooks.errors import CommHookStateError
from commhooks.hook.options import from_json

_FORMAT = 1
"""The version of the JSON that :meth:`Plan.to_json` returns."""
_EXPECTED = "expected a plan as `commhooks plan --save` writes it, found"


@dataclass(frozen=True)
class GroupPlan:
    """The hook of one group of parameters."""

    names: tuple[str, ...]
    bucket: int
    hook: str
    """A spec as on the command line."""
    elements: int
    wire_bytes: float
    """Sent by rank 0 for this group in each step."""
    seconds: float
    """The hook's own work and its collectives, if nothing overlaps with them: an estimate."""
    error: float
    """|average - exact| / |exact| of the group, when it was measured."""
    norm: float
    """Of the average gradient of the group."""
    why: str


@dataclass(frozen=True)
class Plan:
    """A hook for each parameter. Seconds are predictions for the network that it was made for."""

    rows: tuple[GroupPlan, ...]
    before: Timing
    """A step with plain averaging."""
    after: Timing
    """A step with this plan."""
    error: float
    """|average - exact| over all groups, relative to the norm of the average gradient."""
    limit: float
    """The largest ``error`` allowed."""
    reason: str
    """Why this plan and no other, in a sentence."""

    def __post_init__(self) -> None:
        if len(self.hook_of()) < sum(len(row.names) for row in self.rows):
            raise ValueError("a parameter is in two rows")

    def hook_of(self) -> dict[str, str]:
        """Return the spec of each parameter's hook, by the parameter's name."""
        return {name: row.hook for row in self.rows for name in row.names}

    @property
    def elements(self) -> int:
        return sum(row.elements for row in self.rows)

    @property
    def wire_bytes(self) -> float:
        """The bytes that rank 0 sends in each step."""
        return math.fsum(row.wire_bytes for row in self.rows)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary}"

    def table(self, *, all_groups: bool = False) -> str:
        """Return a table with one row for equal groups, such as those of a model's equal layers.

        ``all_groups``: with a row for each of them.
        """
        heads = ("group", "params", "hook", "MB sent", "ms alone", "error", "why")
        cells = (
            (
                label_of(row.names),
                f"{row.elements / max(self.elements, 1):.1%}",
                row.hook,
                f"{row.wire_bytes / 1e6:.3f}",
                f"{row.seconds * 1e3:.2f}",
                f"{row.error:.3g}",
                row.why,
            )
            for row in (self.rows if all_groups else merged(self.rows))
        )
        return aligned([heads, *cells], left=(0, 2, 6))

    @property
    def summary(self) -> str:
        """The reason, and what the plan changes."""
        return (
            f"{self.reason}\nstep: {self.before.step_seconds * 1e3:.1f} ms with plain averaging, "
            f"{self.after.step_seconds * 1e3:.1f} ms with this plan; error {self.error:.3g} of at "
            f"most {self.limit:.3g}; {self.wire_bytes / 1e6:.2f} MB sent"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan in JSON's types."""
        return {"format": _FORMAT} | asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "Plan":
        """Read what :meth:`to_json` returned. Raises CommHookStateError for anything else."""
        try:
            fields = dict(data)
            if (found := fields.pop("format")) == _FORMAT:
                return from_json(cls, fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            text = f"{repr(data)[:60]} ({type(error).__name__}: {error}); make it again"
            raise CommHookStateError(f"{_EXPECTED} {text}") from error
        raise CommHookStateError(
            f"expected a plan of format {_FORMAT}, found format {found!r}; make it again with this "
            "version of commhooks"
        )

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Plan":
        """Read a file that :meth:`save` wrote. Raises CommHookStateError if it cannot be read."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            is_ours = isinstance(error, CommHookStateError)
            text = error if is_ours else f"{_EXPECTED} {error}"
            raise CommHookStateError(f"{path}: {text}") from error

    @classmethod
    def exact(cls, reason: str) -> "Plan":
        """Return a plan without rows, in which all parameters are averaged exactly."""
        no_time = Timing(0.0, 0.0, 0.0, 0)
        return cls((), no_time, no_time, 0.0, 0.0, reason)


def label_of(names: Sequence[str]) -> str:
    """Return the name of the first parameter, and how many there are.

    Numbers that differ are asterisks, "h.*.mlp.weight x12", and three dots stand for other names.
    """
    if len(names) == 1:
        return names[0]
    others = " ..." if len({_pattern(name) for name in names}) > 1 else ""
    return f"{_pattern(names[0])}{others} \N{MULTIPLICATION SIGN}{len(names)}"


def merged(rows: Sequence[GroupPlan]) -> list[GroupPlan]:
    """Return one row for rows whose parameters differ in the numbers of their names only.

    They have the same hook and as many elements. What they send and take is summed up.
    """
    alike: dict[object, list[GroupPlan]] = {}
    for row in rows:
        key = (tuple(_pattern(name) for name in row.names), row.hook, row.elements)
        alike.setdefault(key, []).append(row)
    return [_one(each) if len(each) > 1 else each[0] for each in alike.values()]


def _one(rows: Sequence[GroupPlan]) -> GroupPlan:
    names = tuple(name for row in rows for name in row.names)
    norm = math.sqrt(math.fsum(row.norm**2 for row in rows))
    wrong = math.sqrt(math.fsum((row.error * row.norm) ** 2 for row in rows))
    return replace(
        rows[0],
        names=names,
        elements=sum(row.elements for row in rows),
        wire_bytes=math.fsum(row.wire_bytes for row in rows),
        error=wrong / norm if norm else max(row.error for row in rows),
        norm=norm,
        seconds=math.fsum(row.seconds for row in rows),
        why=Counter(row.why for row in rows).most_common(1)[0][0],
    )


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)
