"""The result of a comparison, for tables, JSON, CSV and data frames."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from commhooks.lab.comparison.rows import (
    HOSTS,
    LOOPBACK,
    ComparisonError,
    Failure,
    HostPair,
    Row,
    TrainingPoint,
)
from commhooks.lab.comparison.table import (
    Columns,
    aligned,
    costs_columns,
    explanations,
    format_bytes,
    pair_cells,
    times_columns,
)
from commhooks.lab.verdict import cost_of_measuring, kept, verdict

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

_EXACT = 1e-5  # a relative error that is only rounding, in float32
_SLOW = 0.5  # of the rate of the fastest pair


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
    measuring_seconds: float | None = field(default=None, compare=False)
    """The time that the comparison took."""

    def __str__(self) -> str:
        """Return tables, notes, failures and verdicts as plain text, as wide as needed."""
        if not self.rows:
            return "\n".join(["nothing was measured", *map(str, self.failures)])
        columns = self.times_columns() | costs_columns(self.rows)
        table = [["hook", *columns]]
        for link in self.links:
            table.append([f"{link}, {self.kind_of(link)}"])
            rows = [row for row in self.rows if row.link == link]
            table += [[f"  {row.hook}", *(cell(row) for cell in columns.values())] for row in rows]
            table += [[f"  {failure.hook}", "failed"] for failure in self.failures_over(link)]
        parts = [self.title, aligned(table), "\n".join(explanations(list(columns)))]
        if self.pairs:
            parts.append(aligned([("pair of hosts", "rate", "latency", ""), *self.pair_cells()]))
        parts.append("\n".join([*self.remarks(), *(f"Failed: {each}" for each in self.failures)]))
        return "\n\n".join(filter(None, parts))

    @property
    def title(self) -> str:
        """What was compared."""
        gradients = format_bytes(self.rows[0].gradient_bytes)
        return f"{self.model}, {self.world_size} ranks, {gradients} of gradients"

    def times_columns(self) -> Columns:
        """Return the columns of times; those of costs do not need the whole comparison."""
        return times_columns(self.rows, self.exposed_spread)

    def pair_cells(self) -> list[tuple[str, str, str, str]]:
        """Return the lines of a table of pairs of hosts."""
        return pair_cells(self.pairs, self.slow_pairs)

    def remarks(self) -> list[str]:
        """Return the notes and the verdicts, a line each."""
        notes = [f"Note: {note}." for note in self.notes]
        return notes + [f"{link}: {text}" for link, text in self.verdicts().items()]

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

    def kind_of(self, link: str) -> str:
        """Return "measured" or "predicted", which the times over a link are."""
        is_measured = any(row.measured for row in self.rows if row.link == link)
        return "measured" if is_measured else "predicted"

    def failures_over(self, link: str) -> list[Failure]:
        """Return the hooks that failed over a link; over the first, those that cannot be made."""
        return [each for each in self.failures if (each.link or self.links[0]) == link]

    def exposed_spread(self, row: Row) -> float | None:
        """Return the noise of ``exposed_seconds``: as ``step_spread_seconds``, of a difference."""
        rows = {each.hook: each for each in self.rows if each.link == row.link}
        if not row.measured:  # it is predicted from the first link
            rows = {each.hook: each for each in self.rows if each.link == self.links[0]}
        spreads = [rows[hook].step_spread_seconds for hook in (row.hook, "bare") if hook in rows]
        known = [spread for spread in spreads if spread is not None]
        return math.hypot(*known) if known else None

    def verdicts(self) -> dict[str, str]:
        """Return by link which hook to use, and from how many steps on it was worth comparing."""
        return {link: text for link in self.links if (text := self._verdict(link))}

    def _verdict(self, link: str) -> str:
        rows = {row.hook: row for row in self.rows if row.link == link}
        baseline = next((name for name in ("torch", "allreduce") if name in rows), None)
        if baseline is None or len(rows.keys() - {"bare", baseline}) == 0:
            return ""
        seconds = {hook: row.step_seconds for hook, row in rows.items()}

        def noise(*hooks: str) -> float:
            """Return about two standard errors of the difference of medians."""
            spreads = [self.exposed_spread(rows[hook]) or 0.0 for hook in hooks]
            return 2 * math.hypot(*spreads) / math.sqrt(max(self.steps, 1))

        plain = rows[baseline].validation_loss
        exact = [hook for hook, row in rows.items() if row.error is not None and row.error < _EXACT]
        losses = dict.fromkeys(exact, 0.0)
        losses |= {
            hook: 100 * (row.validation_loss / plain - 1)
            for hook, row in rows.items()
            if plain and row.validation_loss is not None
        }
        text = verdict(seconds, baseline, losses, noise)
        if self.measuring_seconds is not None and "bare" in rows:
            keep = kept(seconds, baseline, noise)
            saved = seconds[keep] - seconds["bare"]
            text += f" {cost_of_measuring(self.measuring_seconds, saved, noise(keep))}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in JSON's types; infinity becomes the string "inf"."""
        rows = [asdict(row) | {"validation_loss": row.validation_loss} for row in self.rows]
        plain: dict[str, Any] = _plain(asdict(self) | {"rows": rows, "verdicts": self.verdicts()})
        return plain

    def to_csv(self) -> str:
        """Return one line per row, without the training points, and one per failure."""
        names = [each.name for each in fields(Row) if each.name != "training"]
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
