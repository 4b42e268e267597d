"""The result of a comparison, for tables, JSON, CSV and data frames."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from commhooks.errors import CommHookError

__all__ = [
    "HOSTS",
    "LOOPBACK",
    "Comparison",
    "ComparisonError",
    "ComparisonInterrupted",
    "Failure",
    "HostPair",
    "Row",
    "TrainingPoint",
]

LOOPBACK = "loopback"
HOSTS = "network of these hosts"

_SLOW = 0.5  # of the rate of the fastest pair


class ComparisonError(CommHookError):
    """A comparison is not possible, or the model fails without any hook."""


@dataclass(frozen=True)
class TrainingPoint:
    """The state after ``step`` training steps; seconds and bytes are totals so far."""

    step: int
    seconds: float
    wire_bytes: float
    validation_loss: float


@dataclass(frozen=True)
class Row:
    """One entry over one link. Times are those of the slowest rank, bytes those of rank 0."""

    hook: str
    """The text of the hook, "bare" for the bare model or "torch" for torch DDP."""
    link: str
    """ "loopback", a rate, or "network of these hosts"."""
    bits_per_second: float | None
    """None unless the link is a rate."""
    measured: bool
    """True if times are measured, False if they are predicted from loopback."""
    step_seconds: float
    """Forward and backward; the median over steps."""
    step_spread_seconds: float | None
    """The distance between the quartiles over steps; None if not measured."""
    to_torch: float
    """``step_seconds`` divided by that of torch DDP with its plain average."""
    exposed_seconds: float
    """The time that the entry adds to a step of the bare model; the median over blocks of steps."""
    waited_seconds: float | None
    """The mean time in which backward only waited for communication; None if not known."""
    floor_seconds: float | None
    """Bytes on the wire divided by the rate, plus the bare step; None for loopback."""
    predicted_seconds: float | None
    """The predicted time of a step, also for measured links; None if it cannot be predicted."""
    gradient_bytes: int
    wire_bytes: float
    """The mean per step."""
    ratio: float | None
    """The bytes of plain averaging divided by ``wire_bytes``."""
    error: float | None
    """The relative L2 error of a step's gradients against the exact mean, on the worst rank. None
    for the bare model."""
    peak_bytes: int | None
    """The peak of memory besides the parameters: gradients, buckets, state, temporaries."""
    break_even_bits_per_second: float | None
    """The rate below which the hook is faster than torch DDP. Infinity: at any rate; 0: never."""
    training: tuple[TrainingPoint, ...] = ()

    @property
    def validation_loss(self) -> float | None:
        """The loss after the last training step."""
        return self.training[-1].validation_loss if self.training else None


@dataclass(frozen=True)
class HostPair:
    """The network between two hosts of a job, while no other pair sends."""

    first: str
    second: str
    bits_per_second: float
    """Of the slower direction."""
    latency_seconds: float
    """Of one direction."""


@dataclass(frozen=True)
class Failure:
    """A hook that failed. It has no rows from ``link`` on, or no training if that failed."""

    hook: str
    link: str | None
    """The link over which it failed; None if the hook cannot be made."""
    reason: str
    """One line."""
    details: str = ""
    """The traceback of the rank, or the last lines of its output if it died."""

    def __str__(self) -> str:
        where = "" if self.link is None else f" ({self.link})"
        return f"{self.hook}{where}: {self.reason}"


@dataclass(frozen=True)
class Comparison:
    """All rows of a comparison, and what was compared."""

    model: str
    world_size: int
    steps: int
    machine: Mapping[str, Any]
    notes: tuple[str, ...]
    """Sentences that a reader of the figures must know."""
    rows: tuple[Row, ...]
    pairs: tuple[HostPair, ...] = ()
    """All pairs of hosts, if torchrun started the ranks."""
    failures: tuple[Failure, ...] = ()
    """The hooks that failed, each once."""

    @property
    def slow_pairs(self) -> list[HostPair]:
        """The pairs with less than half of the fastest pair's rate, the slowest first."""
        pairs = sorted(self.pairs, key=lambda pair: pair.bits_per_second)
        return [p for p in pairs if p.bits_per_second < _SLOW * pairs[-1].bits_per_second]

    @property
    def links(self) -> list[str]:
        """All links in order, loopback first if it was measured."""
        return list(dict.fromkeys(row.link for row in self.rows))

    @property
    def hooks(self) -> list[str]:
        """All entries in order, "bare" and "torch" first."""
        return list(dict.fromkeys(row.hook for row in self.rows))

    def row(self, hook: str, link: str = LOOPBACK) -> Row:
        """Return the row of a hook and a link. Raises KeyError if there is none."""
        for row in self.rows:
            if (row.hook, row.link) == (hook, link):
                return row
        raise KeyError((hook, link))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in JSON's types; infinity becomes the string "inf"."""
        rows = [asdict(row) | {"validation_loss": row.validation_loss} for row in self.rows]
        plain: dict[str, Any] = _plain(asdict(self) | {"rows": rows})
        return plain

    def to_csv(self) -> str:
        """Return one line per row, without the training points, and one per failure."""
        names = [field.name for field in fields(Row) if field.name != "training"]
        names += ["validation_loss", "reason"]
        text = io.StringIO()
        writer = csv.DictWriter(text, names, extrasaction="ignore")
        writer.writeheader()
        plain = self.to_dict()
        writer.writerows(plain["rows"] + plain["failures"])
        return text.getvalue()


class ComparisonInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a comparison; ``comparison`` is what had been measured."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__("the comparison was interrupted")
        self.comparison = comparison


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
