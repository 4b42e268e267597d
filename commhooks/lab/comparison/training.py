"""Run a user's training function with one entry.

The training function is a generator function ``train(model, rank, world_size)``. Each ``next()``
runs one training step on the wrapped model and yields a function without arguments, which returns
the loss on validation data, a float. That function is called after some of the steps, on all ranks;
its time does not count. ::

    def train(model, rank, world_size):
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in batches(rank, world_size):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            yield lambda: validate(model)
"""

import inspect
import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from commhooks.comm.wire import all_reduce_bytes
from commhooks.errors import CommHookError
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.comparison.result import TrainingPoint
from commhooks.lab.models import Workload, load_callable

_SEED = 20190530

Steps = Iterator[Callable[[], float]]


class TrainingError(CommHookError, ValueError):
    """The training function does not follow the protocol."""


def load_training_function(path: str) -> Callable[..., Steps]:
    """Load the function that ``package.module:function`` names.

    Raises ModelError and TrainingError.
    """
    function = load_callable(path)
    if not inspect.isgeneratorfunction(function):
        raise TrainingError(
            f"{path!r}: expected a generator function train(model, rank, world_size) that yields a "
            f"function for the validation loss after each step; found {function!r}"
        )
    return function


class TrainingRun:
    """The training of one entry on one rank, from its first step."""

    def __init__(self, entry: Entry, workload: Workload, function: str, rank: int) -> None:
        self._path = function
        module = workload.make_module()
        self._gradient_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        model, self._handle = entry.wrap(module)
        torch.manual_seed(_SEED + 1 + rank)
        self._steps = load_training_function(function)(model, rank, dist.get_world_size())
        self._validate: Callable[[], float] = lambda: math.nan
        self._count = 0
        self._seconds = 0.0

    def step(self) -> float:
        """Run the next training step, which all ranks begin together, and return its seconds."""
        dist.barrier()
        start = time.perf_counter()
        self._validate = self._next()
        seconds = time.perf_counter() - start
        self._seconds += seconds
        self._count += 1
        return seconds

    def validate(self) -> TrainingPoint:
        """Return the point after the last step; its loss is the mean over ranks."""
        with torch.no_grad():
            loss = torch.tensor(float(self._validate()), dtype=torch.float64)
        dist.all_reduce(loss)
        mean = loss.item() / dist.get_world_size()
        return TrainingPoint(self._count, self._seconds, self._sent(), mean)

    def _next(self) -> Callable[[], float]:
        try:
            validate = next(self._steps)
        except StopIteration:
            raise TrainingError(
                f"{self._path!r} ended after {self._count} steps; expected at least as many steps "
                "as were requested, for example with `while True`"
            ) from None
        if not callable(validate):
            raise TrainingError(
                f"{self._path!r}: expected it to yield a function without arguments that returns "
                f"the validation loss, found {validate!r}"
            )
        return validate

    def _sent(self) -> float:
        if self._handle is None:
            return self._count * all_reduce_bytes(self._gradient_bytes, dist.get_world_size())
        stats = self._handle.stats()
        return self._count * (stats.total.wire_bytes or 0.0)
