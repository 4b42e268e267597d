"""What a step was seen to do, and when: nanoseconds of ``time.monotonic_ns()`` throughout."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from reducer import GradBucket

__all__ = ["HookRun", "Recording", "Run", "Span", "Stage"]


@dataclass(slots=True)
class Stage:
    """One collective of a hook."""

    operation: str
    ranks: tuple[int, ...]
    """Those that take part; empty: all."""
    awaited_ns: int
    """When the hook asked for it,"""
    issued_ns: int
    """when its turn came, see Note [Order of collectives],"""
    completed_ns: int = 0
    """and when the hook could run on."""
    wire_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a hook on one bucket, over now. ``wire_bytes`` is None where it is not known."""

    bucket: GradBucket
    wire_bytes: float | None
    start_ns: int
    end_ns: int
    stages: Sequence[Stage] = ()

    @property
    def seconds(self) -> float:
        """From start to end."""
        return (self.end_ns - self.start_ns) * 1e-9


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of the reducer, as ``Reducer.stop_recording()`` describes it."""

    activity: str
    index: int
    start_ns: int
    end_ns: int
    key: str = ""
    names: Sequence[str] = ()
    hook: str = ""


@dataclass(frozen=True, slots=True)
class HookRun:
    """What is kept of a :class:`Run`: not the bucket, which holds memory."""

    key: str
    wire_bytes: float | None
    start_ns: int
    end_ns: int
    stages: Sequence[Stage]


@dataclass
class Recording:
    """Of some steps of one model on one rank. ``parameters``: names, by index."""

    parameters: Sequence[str]
    spans: list[Span] = field(default_factory=list)
    runs: list[HookRun] = field(default_factory=list)

    def add_run(self, run: Run) -> None:
        """Called on whatever thread the hook has ended."""
        kept = HookRun(run.bucket.key, run.wire_bytes, run.start_ns, run.end_ns, run.stages)
        self.runs.append(kept)

    def run_of(self, hook: Span) -> HookRun | None:
        """What is known of the run that ``hook`` is the span of."""
        runs = (run for run in self.runs if run.key == hook.key)
        return next((run for run in runs if hook.start_ns <= run.start_ns <= hook.end_ns), None)
