"""The result of a comparison: its rows, and tables, JSON and CSV of them."""

import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from commhooks.costs.units import aligned, format_bytes, format_duration, format_rate
from commhooks.errors import CommHookError
from commhooks.lab.simulation.study import BreakEvenRates
from commhooks.lab.verdict import cost_of_measuring, fallback_hook, fidelity_text, verdict

LOOPBACK = "loopback"
HOSTS = "network of these hosts"
_EXACT = 1e-5  # a relative error that is only rounding, in float32
_SLOW = 0.5  # of the rate of the fastest pair

_EXPLANATIONS = {
    "step": "forward and backward on the slowest rank; median (mean if steps send unequal bytes) "
    "± distance between the quartiles.",
    "of torch": "the step divided by that of torch DDP.",
    "exposed": "the time that averaging adds to a step of the bare model.",
    "loss": "validation loss after training here.",
    "wire": "bytes that one rank sends per step.",
    "ratio": "bytes of plain averaging divided by those of the hook.",
    "error": "relative error of one step's gradients against the exact mean.",
    "fidelity": "largest change of the validation loss in small trainings, at default options.",
    "memory": "peak, besides the parameters.",
    "break-even": "the hook is faster than torch DDP on links below this rate, or as it says.",
    "rate": "of the slower direction, one pair at a time.",
    "latency": "of a message of 1 byte in one direction.",
    "note": "slow if the rate is less than half of that of the fastest pair.",
}


class ComparisonError(CommHookError):
    """A comparison is not possible, or the model fails without any hook."""


@dataclass(frozen=True)
class TrainingPoint:
    """The state after ``step`` training steps; seconds and bytes are totals so far."""

    step: int
    seconds: float
    wire_bytes: float
    validation_loss: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One entry over one link. Times are those of the slowest rank, bytes those of rank 0."""

    step_seconds: float
    """Forward and backward; the median over steps, or the mean if they send unequal bytes."""
    step_spread_seconds: float | None = None
    """The distance between the quartiles over steps; None if not measured."""
    backward_seconds: float | None = None
    """Backward, as ``step_seconds``; None if not measured."""
    exposed_seconds: float
    """The time that the entry adds to a step of the bare model; the median over blocks of steps, or
    the mean if steps send unequal bytes."""
    wire_bytes: float
    """The mean per step."""


@dataclass(frozen=True, kw_only=True)
class Row(Figures):
    """The figures of an entry over a link, and what follows from them and from other rows."""

    hook: str
    """The text of the hook, "bare" for the bare model or "torch" for torch DDP."""
    link: str
    """ "loopback", a rate, or "network of these hosts"."""
    bits_per_second: float | None
    """None unless the link is a rate."""
    measured: bool
    """True if times are measured, False if they are predicted from loopback."""
    to_torch: float
    """``step_seconds`` divided by that of torch DDP with its plain average."""
    floor_seconds: float | None
    """Bytes on the wire divided by the rate, plus the bare step; None for loopback."""
    predicted_seconds: float | None
    """The predicted time of a step, also for measured links; None if it cannot be predicted."""
    gradient_bytes: int
    ratio: float | None
    """The bytes of plain averaging divided by ``wire_bytes``."""
    error: float | None
    """The relative L2 error of a step's gradients against the exact mean, on the worst rank. None
    for the bare model."""
    peak_bytes: int | None
    """The peak of memory besides the parameters: gradients, buckets, state, temporaries."""
    break_even_bits_per_second: float | None
    """The rate below which the hook is faster than torch DDP. Infinity: at any rate; 0: never."""
    break_even_above_bits_per_second: float = 0.0
    """The rate above which it is, too: a hook may save rounds of messages, and send more bytes."""
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
    """Rate of the slower direction."""
    latency_seconds: float
    """Latency of one direction."""


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
    """The rows of a comparison, its model and its setting."""

    model: str
    world_size: int
    steps: int
    machine: Mapping[str, Any]
    notes: tuple[str, ...]
    """Sentences about the conditions of the measurement."""
    rows: tuple[Row, ...]
    pairs: tuple[HostPair, ...] = ()
    """All pairs of hosts, if torchrun started the ranks."""
    failures: tuple[Failure, ...] = ()
    """The hooks that failed, each once."""
    alone_seconds: float | None = None
    """A step of the bare model on one rank while no other computes, if ranks share CUDA devices;
    else None. The verdicts then judge by this and the exposed times, in which bare shared too."""
    measuring_seconds: float | None = field(default=None, compare=False)
    """The time that the comparison took."""

    def __str__(self) -> str:
        """Return tables, notes, failures and verdicts as plain text, as wide as needed."""
        if not self.rows:
            return "\n".join(["nothing was measured", *map(str, self.failures)])
        gradients = format_bytes(self.rows[0].gradient_bytes)
        ranks = f"{self.world_size} ranks on {self.machine.get('device', 'CPU')}"
        parts = [f"{self.model}, {ranks}, {gradients} of gradients"]
        for lines in self._tables():
            known = (f"{n}: {_EXPLANATIONS[n]}" for n in lines[0] if n in _EXPLANATIONS)
            parts += [aligned(lines), "\n".join(known)]
        remarks = [f"Note: {note}." for note in self.notes]
        remarks += [f"{link}: {text}" for link, text in self.verdicts().items()]
        parts.append("\n".join([*remarks, *(f"Failed: {each}" for each in self.failures)]))
        return "\n\n".join(filter(None, parts))

    def _tables(self) -> list[list[tuple[str, ...]]]:
        """Return tables of pairs of hosts, of times by link, and of costs that no link changes.

        Each begins with the names of its columns. A line of one cell is the heading of those that
        follow; lines of failed hooks are shorter.
        """
        slowest_first = sorted(self.pairs, key=lambda pair: pair.bits_per_second)
        pairs: list[tuple[str, ...]] = [("pair of hosts", "rate", "latency", "note")]
        pairs += (
            (
                f"{pair.first} - {pair.second}",
                format_rate(pair.bits_per_second),
                format_duration(pair.latency_seconds),
                "slow" if pair.bits_per_second < _SLOW * slowest_first[-1].bits_per_second else "",
            )
            for pair in slowest_first
        )
        used_times, used_costs = (  # the columns that are not empty on all links
            {name: cell for name, cell in each.items() if any(cell(self, row) for row in self.rows)}
            for each in (_TIMES, _COSTS)
        )

        def cells(columns: "_Columns", row: Row) -> list[str]:
            return [cell(self, row) for cell in columns.values()]

        times: list[tuple[str, ...]] = [("hook", *used_times)]
        for link in self.links:
            times.append((f"{link}, {self.kind_of(link)}",))
            times += [(f"  {row.hook}", *cells(used_times, row)) for row in self.over(link)]
            # Hooks that cannot be made have failed over the first link.
            failed = [each for each in self.failures if (each.link or self.links[0]) == link]
            times += [(f"  {failure.hook}", "failed") for failure in failed]
        costs: list[tuple[str, ...]] = [("hook", *used_costs)]
        costs += [(row.hook, *cells(used_costs, row)) for row in self.over(self.links[0])]
        return [*([pairs] if self.pairs else []), times, costs]

    @property
    def links(self) -> list[str]:
        """All links in order, loopback first if it was measured."""
        return list(dict.fromkeys(row.link for row in self.rows))

    @property
    def hooks(self) -> list[str]:
        """All entries in order, "bare" and "torch" first."""
        return list(dict.fromkeys(row.hook for row in self.rows))

    def over(self, link: str) -> list[Row]:
        """Return the rows of a link."""
        return [row for row in self.rows if row.link == link]

    def row(self, hook: str, link: str = LOOPBACK) -> Row:
        """Return the row of a hook and a link. Raises KeyError if there is none."""
        for row in self.over(link):
            if row.hook == hook:
                return row
        raise KeyError((hook, link))

    def kind_of(self, link: str) -> str:
        """Return "measured" or "predicted", which the times over a link are."""
        return "measured" if any(row.measured for row in self.over(link)) else "predicted"

    def exposed_spread(self, row: Row) -> float | None:
        """Return the noise of ``exposed_seconds``: as ``step_spread_seconds``, of a difference."""
        link = row.link if row.measured else self.links[0]  # from which it is predicted
        spreads = [r.step_spread_seconds for r in self.over(link) if r.hook in (row.hook, "bare")]
        known = [spread for spread in spreads if spread is not None]
        return math.hypot(*known) if known else None

    def verdicts(self) -> dict[str, str]:
        """Return by link which hook to use, and from how many steps on it was worth comparing."""
        return {link: text for link in self.links if (text := self._verdict(link))}

    def _verdict(self, link: str) -> str:
        rows = {row.hook: row for row in self.over(link)}
        baseline = next((name for name in ("torch", "allreduce") if name in rows), None)
        if baseline is None or len(rows.keys() - {"bare", baseline}) == 0:
            return ""
        seconds = {hook: row.step_seconds for hook, row in rows.items()}
        if self.alone_seconds is not None:
            alone = self.alone_seconds
            seconds = {hook: alone + row.exposed_seconds for hook, row in rows.items()}

        def noise(*hooks: str) -> float:
            """Return about two standard errors of the difference of medians."""
            spreads = [self.exposed_spread(rows[hook]) or 0.0 for hook in hooks]
            return 2 * math.hypot(*spreads) / math.sqrt(max(self.steps, 1))

        plain = rows[baseline].validation_loss
        exact = [hook for hook, row in rows.items() if row.error is not None and row.error < _EXACT]
        losses = dict.fromkeys(exact, 0.0)
        losses |= {
            hook: 100 * (row.validation_loss - plain) / abs(plain)
            for hook, row in rows.items()
            if plain and row.validation_loss is not None
        }
        text = verdict(seconds, baseline, losses, noise)
        if self.measuring_seconds is not None and "bare" in rows:
            keep = fallback_hook(seconds, baseline, noise)
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
        every = ("hook", "link", *(each.name for each in fields(Row)), "validation_loss", "reason")
        names = [name for name in dict.fromkeys(every) if name != "training"]
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


_Columns = Mapping[str, Callable[[Comparison, Row], str]]
"""Functions that return the text of a cell, by the name of the column."""

_TIMES: _Columns = {
    "step": lambda _, row: _milliseconds(row.step_seconds, row.step_spread_seconds),
    "of torch": lambda _, row: "" if row.hook == "bare" else f"{row.to_torch:.2f}",
    "exposed": lambda comparison, row: (
        ""
        if row.hook == "bare"
        else _milliseconds(row.exposed_seconds, comparison.exposed_spread(row))
    ),
    "loss": lambda _, row: "" if row.validation_loss is None else f"{row.validation_loss:.4g}",
}
_COSTS: _Columns = {
    "wire": lambda _, row: format_bytes(row.wire_bytes) if row.wire_bytes else "",
    "ratio": lambda _, row: "" if row.ratio is None else f"{row.ratio:.1f}x",
    "error": lambda _, row: "" if row.error is None else f"{row.error:.1e}",
    "fidelity": lambda _, row: fidelity_text(row.hook),
    "memory": lambda _, row: "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
    "break-even": lambda _, row: _break_even(row),
}


def _milliseconds(seconds: float, spread: float | None) -> str:
    """Format in milliseconds, with the spread if there is one: '12.3 ± 0.4 ms'."""
    digits = 1 if abs(seconds) < 0.1 else 0
    spread_text = "" if spread is None else f" ± {1e3 * spread:.{digits}f}"
    return f"{1e3 * seconds:.{digits}f}{spread_text} ms"


def _break_even(row: Row) -> str:
    below, above = row.break_even_bits_per_second, row.break_even_above_bits_per_second
    if below is None:
        return ""
    if above > 0 or math.isinf(below):
        return str(BreakEvenRates(above, below))
    return format_rate(below) if below else "never"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
