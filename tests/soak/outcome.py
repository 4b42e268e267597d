"""What a rank of a trial reports."""

from dataclasses import dataclass, field

__all__ = ["Outcome"]


@dataclass
class Outcome:
    """The report of one rank."""

    digests: dict[int, str] = field(default_factory=dict)
    """Of all parameters after each step that did not fail."""
    finite: bool = True
    errors: list[tuple[int, str, str, float]] = field(default_factory=list)
    """Step, type, text, and the seconds since the step began."""
    refused: str = ""
    """Why the hook was not registered."""
    injected_at: float | None = None
    failed_at: float | None = None
    done: bool = False
