"""What each rank does: it trains a copy of the model with each setting, in blocks of steps."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from bench.auto.models import MODELS, Model
from commhooks.adapters.wrapper import wrap
from commhooks.algorithms import Auto
from commhooks.algorithms.wrappers.table import residual_of
from commhooks.algorithms.wrappers.trial import relative_error
from commhooks.comm.communicator import Communicator
from commhooks.planning import Plan
from reducer import GradBucket


class _Training:
    """A copy of the model that is trained with a hook, by SGD.

    If it ``is_metered``, the error of its averages can be measured, as ``auto`` does, but of all
    numbers of a step. Hooks that are metered do not run in C++, ``auto`` only while it is measured.
    """

    def __init__(self, config: Mapping[str, Any], rank: int, *, is_metered: bool) -> None:
        self._kind, module = _models[0]
        self._rank, self._steps = rank, 0
        self._squares: list[tuple[Tensor, Tensor]] | None = None
        """Of each bucket, while errors are measured."""
        self.hook = commhooks.create(config)
        self._reduce = self.hook.reduce
        if is_metered:
            self._meter()
        self._model = wrap(copy.deepcopy(module))
        self._optimizer = torch.optim.SGD(self._model.parameters(), self._kind.rate)
        self._handle = commhooks.register(self._model, self.hook)
        torch.manual_seed(1 + rank)

    def step(self) -> float:
        """Train a step, which all ranks begin together, and return its seconds."""
        dist.barrier()
        start = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(*self._kind.batch(self._steps, self._rank)).backward()
        self._optimizer.step()
        self._steps += 1
        return time.perf_counter() - start

    def error(self) -> float:
        """Train a step, and return the error of its average."""
        self._squares = []
        self.step()
        wrong, right = (sum(map(float, each)) for each in zip(*self._squares, strict=True))
        self._squares = None
        return relative_error(wrong, right)

    def sent(self) -> tuple[int, float]:
        """Return the number of steps so far, and the bytes that this rank has sent in them."""
        stats = self._handle.stats()
        return stats.steps, stats.steps * (stats.total.wire_bytes or 0.0)

    def _meter(self) -> None:
        def set_method(name: str, method: object) -> None:
            object.__setattr__(self.hook, name, method)

        set_method("reduce", self._measured)
        if isinstance(self.hook, Auto):
            native_at = self.hook.native_at
            set_method("native_at", lambda *of: native_at(*of) if self._squares is None else None)
        else:
            set_method("native", lambda _: None)

    async def _measured(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        if self._squares is None:
            return await self._reduce(bucket, comm)
        exact = bucket.buffer().clone()
        places = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        for (name, start, length), gradient in zip(places, bucket.gradients(), strict=True):
            residual = residual_of(self.hook, name, gradient, comm.size)
            if residual is not None:
                exact[start : start + length] += residual
        average = await self._reduce(bucket, comm)
        await comm.all_reduce(exact.div_(comm.size))
        wrong = torch.sub(average.view(-1), exact).double().square().sum()
        self._squares.append((wrong, exact.double().square().sum()))
        return average


_models: list[tuple[Model, nn.Module]] = []
"""At most one, and its module after its first steps."""
_trainings: dict[str, _Training] = {}


def prepare(rank: int, model: str) -> int:
    """Forget all trainings. Return the number of parameters of ``model``."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())  # as torchrun does
    _trainings.clear()
    module = MODELS[model].make()
    _models[:] = [(MODELS[model], module)]
    return sum(parameter.numel() for parameter in module.parameters())


def add(rank: int, name: str, config: Mapping[str, Any], is_metered: bool) -> None:
    """Begin a training."""
    _trainings[name] = _Training(config, rank, is_metered=is_metered)


def drop(rank: int, name: str) -> None:
    """Forget a training."""
    del _trainings[name]


def seconds(rank: int, name: str, steps: int) -> list[float]:
    """Train some steps. Return the seconds of each."""
    return [_trainings[name].step() for _ in range(steps)]


def errors(rank: int, name: str, steps: int) -> list[float]:
    """Train some steps with a metered hook. Return the error of the average of each."""
    return [_trainings[name].error() for _ in range(steps)]


def sent(rank: int, name: str) -> tuple[int, float]:
    """Return the number of steps so far, and the bytes that this rank has sent in them."""
    return _trainings[name].sent()


def learned(rank: int, name: str) -> tuple[Plan, list[dict[str, Any]], dict[str, float], float]:
    """Return the plan of ``auto``, its history and metrics, and the seconds of measuring."""
    hook: Any = _trainings[name].hook
    spent = hook._measuring._spent_ns * 1e-9
    return hook.plan, [vars(each) for each in hook.history], hook.metrics(), spent


def pid(rank: int) -> int:
    """Return the process of this rank."""
    return os.getpid()
