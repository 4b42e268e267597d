"""The base of runners, which run a hook for a wrapped model; each backend needs another one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, tree
from commhooks.runtime.side_stream import SideStream, record_on_current_stream
from commhooks.runtime.stats import StatsCollector
from reducer import GradBucket


class Runner(ABC):
    """Runs one hook on bucket after bucket. The reducer can call it in place of a torch hook.

    Args:
        hook: The hook to run.
        group: The ranks to average over.
        device: The device of the buckets.
        token: A number that is the same on all ranks and that no other runner uses.
        collector: That of an earlier runner of the hook, to continue its statistics.
    """

    def __init__(
        self,
        hook: CommHook,
        group: dist.ProcessGroup,
        device: torch.device,
        token: int,
        collector: StatsCollector | None = None,
    ) -> None:
        self.name = hook.name
        """The hook's name, for error messages and profiles."""
        self.checks_finite = hook.checks_finite
        """Whether the reducer is to tell which buckets are finite: GradBucket.all_finite."""
        self.collector = collector or StatsCollector()
        """The costs of the executions."""
        self._hook = hook
        self._group = group
        self._device = device
        self._token = token
        self._stream = SideStream(device)

    def is_captured(self, step: int) -> bool:
        """Return whether a CUDA graph captures the current stream; raise if it must not.

        A replay runs no Python: it repeats what depended on a step, a seed, or the place of a
        state. Our own wrapper asks before forward, when no stream has been forked yet whose work
        would be left unjoined; where torch's wrapper is used, each bucket asks.
        """
        if self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return False
        if (first := self.capturable_from()) is None:
            raise CommHookError(
                f"a CUDA graph cannot capture hook {self._hook!r}: each replay would repeat one "
                "step of the hook. Expected a hook that declares `capturable_from`, such as bf16, "
                "int8 with rounding to nearest, or powersgd, and a process group on NCCL"
            )
        if step < first or not self.has_run():
            raise CommHookError(
                f"a CUDA graph cannot capture step {step} of hook {self._hook!r}: expected step "
                f"{first} or a later one, after a step without a graph in which the hook has made "
                "its state; train so far before the capture, and one step after loading a state"
            )
        return True

    def capturable_from(self) -> int | None:
        """Return the first step of the hook that a CUDA graph may capture, None if none."""
        return None

    def has_run(self) -> bool:
        """Whether a step without a graph has made what the hook keeps."""
        return False

    @abstractmethod
    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Run the hook on ``bucket``; return a future of the average.

        Does not synchronize. A step begins with the bucket of index 0 and ends with the one that
        ``is_last()``, or with :meth:`end_step`. Errors are set in the future: CommHookErrors, or
        what the hook raised if that is no Exception, such as SystemExit.
        """

    @abstractmethod
    def connect(self, stages: Mapping[tuple[int, ...], int]) -> None:
        """Connect what :meth:`CommHook.collectives` returned. Blocks until all ranks do so.

        Raises CommHookPeerError if a rank does not come within the timeout. Called before the
        first step.
        """

    @abstractmethod
    def end_step(self, index: int, step: int) -> Future[Tensor]:
        """End a step after ``index`` buckets without a last one.

        Return a future, which completes when all ranks have finished all buckets, or gets the error
        that ended the step. Its value means nothing.
        """

    @abstractmethod
    def abort(self, has_run: bool = True) -> None:
        """Abort the current step: buckets on their way fail, on all ranks.

        The engine calls it by this name when it aborts a step, without ``has_run`` if no bucket of
        the step has been launched on this rank.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait until the exchanges that have begun are over. Their errors show where they are used.

        Called between two steps. All ranks have begun the same exchanges, so they end without
        further calls. Raises CommHookError if a failure has ended the hook for good.
        """

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Read or change what the hook keeps inside this context: Note [Streams and lifetimes].

        Drains first. Tensors that leave it need :func:`record_on_current_stream` after it.
        """
        self.drain()
        with self._stream.forked():
            self._record_states()  # the caller may free what another stream owns
            yield

    def _record_states(self) -> None:
        """Let the current stream use the states of the hook and of those nested in it."""
        for each in tree(self._hook):
            record_on_current_stream(each.state)

    @abstractmethod
    def close(self) -> None:
        """Release threads and connections. The runner is not used afterwards."""
