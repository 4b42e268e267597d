"""The messages between rank processes and their parent."""

import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from commhooks.errors import CommHookError

__all__ = ["READY", "Call", "CallResult", "RankError"]

READY = b"ready"


class RankError(CommHookError):
    """A rank died, or raised what cannot be raised here as it is."""


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
    summary: str = ""
    """The type and the text of the exception."""

    @classmethod
    def of_failure(cls, error: BaseException) -> "CallResult":
        """Return a result that holds as much of the exception as can be sent."""
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # some exceptions can be pickled but not unpickled
        except Exception:
            pickled = None
        text = "".join(traceback.format_exception(error))
        return cls(error_text=text, error=pickled, summary=f"{type(error).__name__}: {error}")

    def exception(self, rank: int, world_size: int) -> BaseException:
        """Return the exception of a failure, with the rank and the remote traceback as a note.

        It is a RankError if the exception could not be pickled, or would end this process.
        """
        error = pickle.loads(self.error) if self.error is not None else None
        where = f"raised on rank {rank} of {world_size}:\n{self.error_text}"
        if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
            return RankError(f"{self.summary}\n{where}")
        assert isinstance(error, BaseException)
        error.add_note(where)
        return error

    def pickled(self) -> bytes:
        """Return the message: this result, or the reason why it cannot be pickled."""
        try:
            return pickle.dumps(self)
        except Exception as error:
            return pickle.dumps(CallResult.of_failure(error))
