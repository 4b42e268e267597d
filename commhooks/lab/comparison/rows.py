"""The parts of a comparison's result: a row per entry and link, failures, pairs of hosts."""

from dataclasses import dataclass

from commhooks.errors import CommHookError

__all__ = [
    "HOSTS",
    "LOOPBACK",
    "ComparisonError",
    "Failure",
    "HostPair",
    "Row",
    "TrainingPoint",
]

LOOPBACK = "loopback"
HOSTS = "network of these hosts"


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
