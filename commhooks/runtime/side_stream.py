"""The stream on which a hook works, beside those of backward."""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

__all__ = ["SideStream"]


class SideStream:
    """A context in which work is enqueued on a stream of its own; on the CPU it does nothing.

    An ``await`` makes the current stream wait for a collective. Were that backward's, then backward
    would wait with it, and nothing would overlap::

        mark = side.mark()                # on backward's stream, when the bucket has been packed
        side.follow(mark, bucket.buffer())
        with side:                        # perhaps in another thread
            future.set_result(...)        # whose waiters' streams wait for this one

    All of a hook's buckets share the stream, so that what it does for one comes after what it did
    for the one before. Nothing here makes the host wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None if device.type == "cpu" else torch.Stream(device=device)

    def mark(self) -> torch.Event | None:
        """Where the current stream is now."""
        if self._stream is None:
            return None
        return torch.accelerator.current_stream(self._device).record_event()

    def follow(self, mark: torch.Event | None, memory: Tensor) -> None:
        """What comes now comes after ``mark``, and may use ``memory``."""
        if self._stream is not None:
            self._stream.wait_event(mark)
            memory.record_stream(self._stream)

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, traceback)
