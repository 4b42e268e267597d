"""Records of what happened in a step; all times are nanoseconds of ``time.monotonic_ns()``."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stage:
    """One collective of a hook."""

    operation: str
    ranks: tuple[int, ...]
    """The ranks that take part; empty if all do."""
    awaited_ns: int
    """When the hook awaited it."""
    issued_ns: int
    """When its turn came: Note [Order of collectives] in comm/issue_order.py."""
    completed_ns: int = 0
    """When the hook could continue."""
    wire_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run of a hook on one bucket, or of an exchange that began on it.

    ``key`` and ``index`` are those of the bucket, which itself would hold memory. ``wire_bytes`` is
    None if it is not known.
    """

    key: str
    index: int
    wire_bytes: float | None
    start_ns: int
    end_ns: int
    stages: Sequence[Stage] = ()
    is_exchange: bool = False

    @property
    def seconds(self) -> float:
        """The time from start to end."""
        return (self.end_ns - self.start_ns) * 1e-9


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of the reducer, as ``Reducer.stop_recording()`` returns it."""

    activity: str
    index: int
    start_ns: int
    end_ns: int
    key: str = ""
    names: Sequence[str] = ()
    hook: str = ""


@dataclass
class Recording:
    """Some steps of one model on one rank. ``parameters``: the names, by index."""

    parameters: Sequence[str]
    spans: list[Span] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def run_of(self, hook: Span) -> Run | None:
        """Return the run that ``hook`` is the span of, or None if there is no record of it."""
        runs = (run for run in self.runs if run.key == hook.key and not run.is_exchange)
        return next((run for run in runs if hook.start_ns <= run.start_ns <= hook.end_ns), None)
