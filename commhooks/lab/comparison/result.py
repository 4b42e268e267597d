"""What a comparison has found; made for JSON, CSV and data frames."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["Comparison", "Row", "TrainingPoint"]

LOOPBACK = "loopback"


@dataclass(frozen=True)
class TrainingPoint:
    """After ``step`` training steps; seconds and bytes are those of all steps so far."""

    step: int
    seconds: float
    wire_bytes: float
    validation_loss: float


@dataclass(frozen=True)
class Row:
    """One contender over one link. Times are the slowest rank's, bytes those that rank 0 sends."""

    hook: str
    link: str
    """ "loopback" or a rate."""
    bits_per_second: float | None
    """None for loopback."""
    measured: bool
    """Whether times are measured, or predicted from loopback."""
    step_seconds: float
    """Forward and backward, median over steps."""
    step_spread_seconds: float | None
    """Between the quartiles over steps."""
    to_torch: float
    """``step_seconds`` over that of torch's own plain averaging."""
    exposed_seconds: float
    """What the contender adds to the step of the bare model: median of the differences."""
    waited_seconds: float | None
    """Mean time that backward did nothing but wait for communication, where the engine tells."""
    floor_seconds: float | None
    """Bytes on the wire over the rate, plus the bare step over loopback; None for loopback."""
    predicted_seconds: float | None
    """What is predicted of the step, for links that are measured as well."""
    gradient_bytes: int
    wire_bytes: float
    """Mean per step."""
    ratio: float | None
    """What plain averaging sends over ``wire_bytes``."""
    error: float | None
    """Of a step's gradients against the exact mean, relative, in L2 norm; the worst rank's. None
    for the bare model."""
    peak_bytes: int | None
    """What the contender needs besides the parameters: gradients, buckets, state, temporaries."""
    break_even_bits_per_second: float | None
    """The rate below which it is faster than torch's plain averaging; inf: always, 0: never."""
    training: tuple[TrainingPoint, ...] = ()

    @property
    def validation_loss(self) -> float | None:
        """After the last training step."""
        return self.training[-1].validation_loss if self.training else None


@dataclass(frozen=True)
class Comparison:
    """All rows, and what they are about."""

    model: str
    world_size: int
    steps: int
    machine: Mapping[str, Any]
    notes: tuple[str, ...]
    """What a reader of the figures has to know."""
    rows: tuple[Row, ...]

    @property
    def links(self) -> list[str]:
        """In order, loopback first."""
        return list(dict.fromkeys(row.link for row in self.rows))

    @property
    def hooks(self) -> list[str]:
        """In order, "bare" and "torch" first."""
        return list(dict.fromkeys(row.hook for row in self.rows))

    def row(self, hook: str, link: str = LOOPBACK) -> Row:
        """Raises KeyError if there is none."""
        for row in self.rows:
            if (row.hook, row.link) == (hook, link):
                return row
        raise KeyError((hook, link))

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; infinity is the text "inf"."""
        rows = [asdict(row) | {"validation_loss": row.validation_loss} for row in self.rows]
        plain: dict[str, Any] = _plain(asdict(self) | {"rows": rows})
        return plain

    def to_csv(self) -> str:
        """One line per row, without the course of training."""
        names = [field.name for field in fields(Row) if field.name != "training"]
        text = io.StringIO()
        writer = csv.DictWriter(text, [*names, "validation_loss"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(self.to_dict()["rows"])
        return text.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
