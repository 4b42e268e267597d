"""The stream on which a hook works, beside those of backward.

Note [Streams and lifetimes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Freed memory goes back at once to the stream on which it was allocated, its owner, even if another
stream has yet to read it. Therefore:

1. What a hook keeps belongs to its side stream. Steps run there: after the mark at which backward
   has packed the bucket, and before the future for which backward's stream waits.
2. Between two steps, what reads, replaces or drops it runs there too: ``between_steps()`` of the
   runner. The side stream waits for the current stream first, the current one for it at the end.
3. A tensor that one stream owns and another one uses is recorded on the other, unless the owner
   waits for that stream before the tensor is freed. Futures do this for results.
4. Exchanges run on a second stream, after the steps before them. The hook refers to an exchange,
   and so to what its coroutine uses, until a step has waited for its result.
5. An error in a future orders no streams. On Gloo the host waits for the side stream before it sets
   one, as the model may be dropped next. On NCCL, where peers may be missing, it does not wait; the
   job ends.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from commhooks.hook.options import instances_in


class SideStream:
    """A context in which work is enqueued on a separate stream. On the CPU it does nothing.

    An ``await`` makes the current stream wait for a collective. If that were the stream of
    backward, backward would wait as well, and nothing would overlap::

        mark = side.mark()                # on backward's stream, when the bucket has been packed
        side.follow(mark, bucket.buffer())
        with side:                        # perhaps in another thread
            future.set_result(...)        # streams that wait for the future wait for this one

    All buckets of a hook share the stream, so its work for one bucket comes after its work for the
    bucket before. Only :meth:`synchronize` makes the host wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # With priority: a collective that starts late keeps all ranks waiting.
        self._stream: Any = torch.Stream(device, priority=-1) if _has_streams(device) else None
        self._entered = threading.local()

    def mark(self, *, timed: bool = False) -> torch.Event | None:
        """Record the position of the current stream, and when it gets there if it is ``timed``."""
        if self._stream is None:
            return None
        event = torch.Event(device=self._device, enable_timing=timed)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def end(self) -> torch.Event | None:
        """Record the position of the separate stream."""
        return None if self._stream is None else self._stream.record_event()

    def follow(self, mark: torch.Event | None, memory: Tensor | None = None) -> None:
        """Make later work wait for ``mark``, and let it use ``memory``."""
        if self._stream is not None:
            self._stream.wait_event(mark)
            if memory is not None:
                memory.record_stream(self._stream)

    def join(self) -> None:
        """Let later work of the current stream wait for the work here."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._stream.record_event())

    def synchronize(self) -> None:
        """Let the host wait for the work here."""
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Work here after all work of the current stream, which then waits for what was done."""
        self.follow(self.mark())
        try:
            with self:
                yield
        finally:
            self.join()

    def __enter__(self) -> None:
        if self._stream is not None:
            # The object keeps what to return to, so threads must not share one.
            self._entered.stream = torch.Stream(
                stream_id=self._stream.stream_id,
                device_index=self._stream.device_index,
                device_type=self._stream.device_type,
            )
            self._entered.stream.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._entered.stream.__exit__(kind, error, traceback)


def record_on_current_stream(value: Any) -> None:
    """Let the current stream use the tensors in nested dicts, which another stream may own.

    Their memory is not reused before the current stream has passed the point at which they are
    freed.
    """
    for _, tensor in instances_in(value, Tensor):
        if _has_streams(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def _has_streams(device: torch.device) -> bool:
    return device.type != "cpu"
