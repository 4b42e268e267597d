"""What each rank does: it trains a copy of the model with each setting, in blocks of steps."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from bench.auto.models import MODELS, Model
from commhooks.adapters.wrapper import wrap
from commhooks.algorithms.adaptive.auto import Auto
from commhooks.algorithms.wrappers.table import residual_of
from commhooks.algorithms.wrappers.trial import relative_error
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.comparison.remote import TrainingRun
from commhooks.lab.models import Workload
from commhooks.planning import Plan
from reducer import GradBucket

_models: list[tuple[Model, nn.Module]] = []
"""At most one, and its module after its first steps."""
_runs: dict[str, TrainingRun] = {}
_meters: dict[str, _Meter] = {}


class _Meter:
    """The error of the averages of a hook, as ``auto`` measures it, but of all numbers of a step.

    Create it before the hook is registered. While it is on, the hook does not run in C++.
    """

    def __init__(self, hook: CommHook) -> None:
        self._hook, self._reduce = hook, hook.reduce
        self._squares: list[tuple[Tensor, Tensor]] = []
        self.is_on = False
        object.__setattr__(hook, "reduce", self._measured)
        if isinstance(hook, Auto):
            native_at = hook.native_at
            object.__setattr__(
                hook, "native_at", lambda *of: None if self.is_on else native_at(*of)
            )
        else:
            object.__setattr__(hook, "native", lambda _: None)

    def error(self) -> float:
        """Return the error of all steps since the last call."""
        wrong, right = (sum(map(float, each)) for each in zip(*self._squares, strict=True))
        self._squares.clear()
        return relative_error(wrong, right)

    async def _measured(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        if not self.is_on:
            return await self._reduce(bucket, comm)
        exact = bucket.buffer().clone()
        places = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        for (name, start, length), gradient in zip(places, bucket.gradients(), strict=True):
            residual = residual_of(self._hook, name, gradient, comm.size)
            if residual is not None:
                exact[start : start + length] += residual
        average = await self._reduce(bucket, comm)
        await comm.all_reduce(exact.div_(comm.size))
        wrong = torch.sub(average.view(-1), exact).double().square().sum()
        self._squares.append((wrong, exact.double().square().sum()))
        return average


class Metered(Entry):
    """An entry for which :func:`errors` can be called."""

    def wrap(self, module: nn.Module, **options: Any) -> tuple[nn.Module, commhooks.HookHandle]:
        """Wrap the module."""
        assert self.config is not None
        hook = commhooks.create(self.config)
        _meters[self.name] = _Meter(hook)
        model = wrap(module, **options)
        return model, commhooks.register(model, hook)


@dataclass(frozen=True)
class Learned:
    """What ``auto`` has found out so far. The same on all ranks, but for the seconds."""

    plan: Plan
    history: list[dict[str, Any]]
    metrics: dict[str, float]
    planning_seconds: float
    """What trials, reports and planning have taken so far."""


def prepare(rank: int, model: str) -> int:
    """Forget all trainings. Return the number of parameters of ``model``."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())  # as torchrun does
    _runs.clear()
    module = MODELS[model].make()
    _models[:] = [(MODELS[model], module)]
    return sum(parameter.numel() for parameter in module.parameters())


def module() -> nn.Module:
    """Return a copy of the module that was prepared."""
    return copy.deepcopy(_models[0][1])


def train(model: nn.Module, rank: int, world_size: int) -> Iterator[Callable[[], float]]:
    """Train with SGD, see Note [Training functions] in remote.py; without validation."""
    kind, _ = _models[0]
    optimizer = torch.optim.SGD(model.parameters(), kind.rate)
    step = 0
    while True:
        optimizer.zero_grad()
        model(*kind.batch(step, rank)).backward()
        optimizer.step()
        step += 1
        yield lambda: math.nan


def add(rank: int, entry: Entry) -> None:
    """Begin a training."""
    workload = Workload("bench.auto.remote:module")
    _runs[entry.name] = TrainingRun(entry, workload, "bench.auto.remote:train", rank)


def drop(rank: int, name: str) -> None:
    """Forget a training."""
    del _runs[name]


def seconds(rank: int, name: str, steps: int) -> list[float]:
    """Train some steps. Return the seconds of each, which all ranks begin together."""
    return [_runs[name].step() for _ in range(steps)]


def errors(rank: int, name: str, steps: int) -> list[float]:
    """Train some steps with a metered entry. Return the error of the average of each."""
    meter = _meters[name]
    found = []
    meter.is_on = True
    for _ in range(steps):
        seconds(rank, name, 1)
        found.append(meter.error())
    meter.is_on = False
    return found


def sent(rank: int, name: str) -> tuple[int, float]:
    """Return the number of steps so far, and the bytes that this rank has sent in them."""
    stats = _handle(name).stats()
    return stats.steps, stats.steps * (stats.total.wire_bytes or 0.0)


def learned(rank: int, name: str) -> Learned:
    """Return what ``auto`` has found out."""
    hook = cast("Auto", _handle(name).hook)
    measuring = hook._measuring
    assert hook.plan is not None
    assert measuring is not None
    history = [vars(decision) for decision in hook.history]
    return Learned(hook.plan, history, hook.metrics(), measuring._spent_ns * 1e-9)


def pid(rank: int) -> int:
    """Return the process of this rank."""
    return os.getpid()


def _handle(name: str) -> commhooks.HookHandle:
    handle = _runs[name]._handle
    assert handle is not None
    return handle
