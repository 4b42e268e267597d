"""The messages between rank processes and their parent."""

import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["READY", "Call", "CallResult"]

READY = b"ready"


@dataclass
class Call:
    """One function call on one rank; ``timeout`` is in seconds."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float
    after: Callable[[], None] | None = None
    """Called after the result has been sent, because it may hang if something went wrong."""
    # Rank processes have neither the parent's path nor its warning filters.
    path: list[str] = field(default_factory=lambda: list(sys.path))
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))

    def pickled(self) -> bytes:
        """Return the message.

        The path is pickled separately, because unpickling the rest imports the caller's module.
        """
        return pickle.dumps((self.path, pickle.dumps(self)))


@dataclass
class CallResult:
    """``value`` if ``error_text`` is None, else the traceback as text and the pickled exception."""

    value: Any = None
    error_text: str | None = None
    error: bytes | None = None  # None if the exception cannot be pickled

    @classmethod
    def of_failure(cls, error: BaseException) -> "CallResult":
        """Return a result that holds as much of the exception as can be sent."""
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # some exceptions can be pickled but not unpickled
        except Exception:
            pickled = None
        return cls(error_text="".join(traceback.format_exception(error)), error=pickled)

    def pickled(self) -> bytes:
        """Return the message: this result, or the reason why it cannot be pickled."""
        try:
            return pickle.dumps(self)
        except Exception as error:
            return pickle.dumps(CallResult.of_failure(error))
