"""Makes the fault of a trial happen."""

import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from commhooks import CommHook
from soak.outcome import Outcome
from soak.trial import Fault

__all__ = ["RAISED", "Injector"]

RAISED: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
}


class Injector:
    """Makes the fault happen on this rank when training gets to its step and place."""

    def __init__(self, fault: Fault, rank: int, outcome: Outcome) -> None:
        self.fault = fault if fault.rank == rank else None
        self.outcome = outcome
        self.step = 0

    def reach(self, place: str) -> None:
        fault = self.fault
        if fault is None or (self.step, place) != (fault.step, fault.place):
            return
        kind = fault.kind
        if kind in ("nan", "none"):
            return
        self.outcome.injected_at = time.monotonic()
        if kind != "slow":
            self.fault = None
        if kind == "slow":
            time.sleep(0.3)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "exit":
            os._exit(3)
        elif kind in ("stop", "long stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "kill at any time":
            delay = (self.step * 7919 + len(place)) % 50 / 1000
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif kind in RAISED:
            raise RAISED[kind]("out of luck")

    def poison(self, model: nn.Module) -> None:
        """Write a NaN into one gradient, if that is the fault."""
        fault = self.fault
        if fault is not None and fault.kind == "nan" and self.step == fault.step:
            parameter = next(model.parameters())
            parameter.register_hook(self._with_nan)

    def _with_nan(self, gradient: Tensor) -> Tensor:
        if self.fault is None or self.step != self.fault.step:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[0] = torch.nan
        return gradient

    def wrap(self, hook: object) -> None:
        """Reach the places "before", "in" and "after" in the hook's reduce."""
        if not isinstance(hook, CommHook):
            return
        reduce = hook.reduce

        async def with_places(bucket: Any, comm: Any) -> Tensor:
            self.reach("before")
            average = await _Driven(reduce(bucket, comm), self.reach)
            self.reach("after")
            return average

        hook.reduce = with_places  # type: ignore[method-assign]


class _Driven(Awaitable[Tensor]):
    """Awaits ``inner`` and calls ``reach("in")`` after its first collective."""

    def __init__(self, inner: Any, reach: Callable[[str], None]) -> None:
        self._inner, self._reach = inner, reach

    def __await__(self) -> Generator[Any, Any, Tensor]:
        steps = self._inner.__await__()
        answer = None
        count = 0
        while True:
            try:
                waited_for = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                answer = yield waited_for
                count += 1
                if count == 1:
                    self._reach("in")
            except BaseException as error:  # as an await in the hook itself would get it
                steps.throw(error)
                raise
