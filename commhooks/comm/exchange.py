"""Exchanges that begin in one step, and whose results are taken in a later one.

Note [Exchanges between steps]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An exchange is a coroutine that a hook hands over in ``reduce``, with :meth:`Communicator.begin`. It
awaits collectives as ``reduce`` does, while training goes on, and a later step awaits it::

    step t      reduce ── begin(f) ── return ── vote ┐
    step t+1    reduce ──────────── return ── vote   │ f: await, await, ...   (own thread, own
    step t+2    reduce ── await exchange ── ... ◄────┘                         connections)

Exchanges keep the rules of steps in this way:

    1. An exchange begins when the step that handed it over has succeeded on all ranks: after the
       vote. So all ranks begin the same ones, by bucket, and a step that fails begins none. A step
       in which a hook begins or awaits an exchange always has a vote.
    2. Exchanges have a scheduler, a thread and stage groups of their own. Among themselves they
       keep Note [Order of collectives], in the order in which they begin. A rank that waits for
       peers here, for example to connect, does not keep them waiting in a step, and vice versa.
    3. An exchange that fails publishes the reason, and all others on this rank fail with it: they
       would overtake it. Their connections close, so no rank waits for them. The error shows in the
       first step that awaits one of them. That step fails on all ranks, also on those where the
       exchange has succeeded.
    4. A step that fails aborts all exchanges, on all ranks, because some may have got further than
       others. The hook forgets them in ``recover()``. To await one that was aborted is an error on
       every rank.

The result is taken in the step that the hook chooses, never when it happens to arrive; so it does
not depend on the speed of the network.
"""

from collections.abc import Callable, Coroutine, Generator
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from commhooks.errors import CommHookError

NOT_BEGUN = (
    "expected an exchange that began in an earlier step, found one that was handed over in this "
    "step, or aborted because a step failed or the hook was registered again; forget exchanges in "
    "recover() and prepare()"
)


def new_future(device: torch.device) -> Future[Tensor]:
    """Return a future of a tensor on ``device``. Waiting for it makes the current stream wait."""
    return Future(devices=[] if device.type == "cpu" else [device])


def completed(tensor: Tensor) -> Future[Tensor]:
    """Return a future that has its value."""
    future = new_future(tensor.device)
    future.set_result(tensor)
    return future


class Exchange:
    """The result of :meth:`Communicator.begin`. ``await`` it in a later step, as often as needed.

    See Note [Exchanges between steps].
    """

    def __init__(self, run: Callable[[], Coroutine[Any, Any, Tensor]] | None) -> None:
        self.run = run
        """Returns the coroutine of the exchange. None if the result comes from a saved state."""
        self.future: Future[Tensor] | None = None
        """The future result. None until the step that handed the exchange over has succeeded."""

    @classmethod
    def finished(cls, result: Tensor) -> "Exchange":
        """Return an exchange that is over, for a result from a saved state."""
        exchange = cls(None)
        exchange.future = completed(result)
        return exchange

    @property
    def is_over(self) -> bool:
        """Whether there is a result or an error."""
        return self.future is not None and self.future.done()

    def result(self) -> Tensor:
        """Return the result of an exchange that is over. On CUDA the current stream waits for it.

        Exchanges are over while ``handle.state_dict()`` saves the state of a hook.

        Raises:
            CommHookError: The exchange has not finished, or it failed.
        """
        if self.future is None or not self.future.done():
            raise CommHookError("the exchange has not finished; await it first")
        return self.future.wait()

    def __await__(self) -> Generator["Exchange", None, Tensor]:
        if self.run is not None:
            yield self  # to the runner of the hook, which continues when the exchange has succeeded
        return self.result()
