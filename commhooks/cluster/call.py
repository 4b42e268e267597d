"""What the processes of ranks and their parent send each other."""

import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["READY", "Call", "Outcome"]

READY = b"ready"


@dataclass
class Call:
    """One function call on one rank; ``timeout`` in seconds."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float
    after: Callable[[], None] | None = None
    """Called once the outcome has been sent, because it may hang if something went wrong."""
    # The parent's, because processes of their own have neither.
    path: list[str] = field(default_factory=lambda: list(sys.path))
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))

    def pickled(self) -> bytes:
        """The path apart, because unpickling the rest imports the caller's module."""
        return pickle.dumps((self.path, pickle.dumps(self)))


@dataclass
class Outcome:
    """``value`` if ``error_text`` is None, else the traceback as text and the pickled exception."""

    value: Any = None
    error_text: str | None = None
    error: bytes | None = None  # None where the exception does not survive pickling

    @classmethod
    def of_failure(cls, error: BaseException) -> "Outcome":
        """With as much of the exception as can be sent."""
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # some exceptions can be written but not read back
        except Exception:
            pickled = None
        return cls(error_text="".join(traceback.format_exception(error)), error=pickled)

    def pickled(self) -> bytes:
        """Itself, or why it cannot be sent."""
        try:
            return pickle.dumps(self)
        except Exception as error:
            return pickle.dumps(Outcome.of_failure(error))
