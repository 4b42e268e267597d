"""One run of a hook, on one bucket: a coroutine, where it stands, and what may go wrong in it."""

import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from commhooks.comm.communicator import Communicator, PendingCollective
from commhooks.errors import CommHookError, CommHookResultError
from commhooks.hook.base import CommHook
from commhooks.runtime.recording import Run, Stage
from reducer import GradBucket

__all__ = ["HookExecution", "new_future"]

_NO_RESULT = torch.empty(0)


class HookExecution:
    """The hook's coroutine for one bucket, from launch to result.

    ``pending`` is the collective that the hook awaits and that is yet to be issued, ``work`` the
    one under way; ``issued`` counts those issued so far by the ranks that took part, see
    Note [Subgroups], the last of which was an ``operation``. ``mark``: where backward's stream was
    when the bucket had been packed.
    """

    def __init__(self, hook: CommHook, bucket: GradBucket, group: dist.ProcessGroup) -> None:
        self.bucket = bucket
        self.comm = Communicator(
            group, step=bucket.step, key=bucket.key, seed=getattr(hook, "seed", 0)
        )
        self.mark: torch.Event | None = None
        self.future = new_future(bucket.buffer().device)
        self.pending: PendingCollective | None = None
        self.issued: dict[tuple[int, ...], int] = {}
        self.work: Work | None = None
        self._stages: list[Stage] = []
        self._start_ns = self._awaited_ns = time.monotonic_ns()
        self._hook = hook
        self._coroutine: Coroutine[PendingCollective, None, Tensor] = self._run()

    @property
    def operation(self) -> str:
        """What the last collective was."""
        return self._stages[-1].operation

    def step(self) -> Tensor | None:
        """Runs the hook to its next ``await``, then ``pending`` is set; or returns its result.

        Only when there is neither a request nor a collective under way.

        Raises CommHookError for whatever the hook raises.
        """
        try:
            request = self._coroutine.send(None)
        except StopIteration as stop:
            result: Tensor = stop.value
            return result
        except CommHookResultError:
            raise
        except Exception as error:
            raise self.error(f"{type(error).__name__}: {error}") from error
        if not isinstance(request, PendingCollective):
            raise self._result_error(
                "can await only what methods of its communicator return, e.g. `await "
                f"comm.all_reduce(tensor)`; it awaits {request!r}"
            )
        self.pending = request
        self._awaited_ns = time.monotonic_ns()
        return None

    def count(self, request: PendingCollective) -> int:
        """Counts ``pending`` as issued; returns its stage, the number of those before it."""
        stage = self.issued.get(request.members, 0)
        self.issued[request.members] = stage + 1
        now = time.monotonic_ns()
        self._stages.append(Stage(request.operation, request.members, self._awaited_ns, now))
        return stage

    def count_bytes(self, request: PendingCollective) -> None:
        """Counts what ``pending``, now under way, puts on the wire."""
        self._stages[-1].wire_bytes = request.count()
        self.comm.wire_bytes += self._stages[-1].wire_bytes

    def end_stage(self) -> None:
        """The collective has completed."""
        self._stages[-1].completed_ns = time.monotonic_ns()

    def run(self) -> Run:
        """What there was, once it is over."""
        end_ns = time.monotonic_ns()
        return Run(self.bucket, self.comm.wire_bytes, self._start_ns, end_ns, self._stages)

    def end_collective(self) -> Exception | None:
        """Lets go of the collective that has completed, and returns its error.

        No frame may hold the work when the hook runs on: what the hook raises keeps all frames
        below it, and the work its channel's connections, by whose end peers learn of a failure.
        """
        self.end_stage()
        work, self.work = self.work, None
        assert work is not None
        try:
            work.wait()
        except Exception as error:
            return error.with_traceback(None)  # whose frame is this one
        return None

    def refuse(self, error: Exception) -> CommHookError:
        """The error of a collective that could not be issued, which the hook sees at its await."""
        try:
            self._coroutine.throw(error)
        except Exception as raised:
            error = raised
        text = f"{type(error).__name__}: {error}"
        failure = self.error(text)
        failure.__cause__ = error
        return failure

    def fail(self, error: CommHookError) -> None:
        """Hands out a copy of ``error`` in place of a result; the execution gives up its future.

        Once raised, an error leads through its traceback to whatever the caller has, the model
        included; so what is raised must not be what we keep. And its cause leads back here, and
        through the future to the error: a circle that the garbage collector does not see, as the
        future is in C++.
        """
        self.work = None
        future = self.future
        del self.future
        copy = type(error)(*error.args)
        copy.__cause__ = error.__cause__
        future.set_exception(copy)  # type: ignore[arg-type]  # torch says Tensor

    def error(self, text: str, kind: type[CommHookError] = CommHookError) -> CommHookError:
        """``text``, with where it happened."""
        names = self.bucket.names
        parameters = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        issued = sum(self.issued.values())
        return kind(
            f"[rank {self.comm.rank}] hook {self._hook!r} failed on bucket {self.bucket.index()} "
            f"(parameters {parameters}) at step {self.bucket.step}, after {issued} "
            f"collectives: {text}"
        )

    def close(self) -> None:
        """Ends the coroutine where it stands."""
        self.pending = None
        with suppress(Exception):  # of `finally` blocks; there is an error to report already
            self._coroutine.close()

    async def _run(self) -> Tensor:
        result = await self._hook.reduce(self.bucket, self.comm)
        self._check(result)
        if self.bucket.is_last():
            await _vote()
        result = result.detach()
        return result if result.dim() == 1 else result.reshape(-1)

    def _check(self, result: Any) -> None:
        buffer = self.bucket.buffer()
        expected = f"{buffer.numel()} elements of {buffer.dtype} on {buffer.device}"
        if isinstance(result, PendingCollective):
            result.is_awaited = True  # or it would complain as well
            raise self._result_error(
                f"returned comm.{result.operation}() itself; expected the average, so `await` it"
            )
        if not isinstance(result, Tensor):
            raise self._result_error(
                f"returned {type(result).__name__}; expected the average, {expected}"
            )
        if (result.numel(), result.dtype, result.device) != (
            buffer.numel(),
            buffer.dtype,
            buffer.device,
        ):
            raise self._result_error(
                f"returned {result.numel()} elements of {result.dtype} on {result.device}; "
                f"expected the average, {expected}"
            )

    def _result_error(self, text: str) -> CommHookError:
        return self.error(text, CommHookResultError)


def new_future(device: torch.device) -> Future[Tensor]:
    """A future of a tensor on ``device``; who waits for it makes the current stream wait."""
    return Future(devices=[] if device.type == "cpu" else [device])


def _vote() -> PendingCollective:
    """See Note [All ranks or none]."""
    return PendingCollective(
        "vote", lambda channel: channel.barrier(), _NO_RESULT, int, is_vote=True
    )
