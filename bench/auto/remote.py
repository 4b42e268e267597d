"""What each rank does: it trains a copy of the model with each setting, in blocks of steps."""

from __future__ import annotations

import copy
import os
import time
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import commhooks
from bench.auto.meter import Meter
from bench.auto.models import MODELS
from commhooks.algorithms.adaptive.auto import Auto
from commhooks.planning import Plan, Problem
from reducer import DistributedDataParallel

__all__ = ["Learned", "add", "drop", "errors", "learned", "pid", "prepare", "seconds", "sent"]


@dataclass
class _Side:
    """The training with one setting."""

    model: nn.Module
    handle: commhooks.HookHandle
    optimizer: torch.optim.Optimizer
    meter: Meter | None
    step: int = 0


@dataclass(frozen=True)
class Learned:
    """What ``auto`` has found out so far. The same on all ranks, but for the seconds."""

    plan: Plan
    problem: Problem | None
    """What the plan would be chosen from now; None if not enough has been measured."""
    history: list[dict[str, Any]]
    metrics: dict[str, float]
    planning_seconds: float
    """What trials, reports and planning have taken so far."""


@dataclass
class _Rank:
    model: str = ""
    module: nn.Module | None = None
    """After its first steps."""
    sides: dict[str, _Side] = field(default_factory=dict)


_rank = _Rank()


def prepare(rank: int, model: str) -> int:
    """Forget all trainings. Return the number of parameters of ``model``."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())  # as torchrun does
    _rank.model, _rank.module, _rank.sides = model, MODELS[model].make(), {}
    return sum(parameter.numel() for parameter in _rank.module.parameters())


def add(rank: int, name: str, config: dict[str, Any], metered: bool) -> None:
    """Begin a training. ``metered``: :func:`errors` can be called, and no hook is native."""
    module = copy.deepcopy(_rank.module)
    assert module is not None
    model = DistributedDataParallel(module, init_sync=False)
    hook = commhooks.create(config)
    meter = Meter(hook) if metered else None
    if metered:
        object.__setattr__(hook, "native", lambda _: None)
    handle = commhooks.register(model, hook)
    optimizer = torch.optim.SGD(module.parameters(), MODELS[_rank.model].rate)
    _rank.sides[name] = _Side(model, handle, optimizer, meter)


def drop(rank: int, name: str) -> None:
    """Forget a training."""
    del _rank.sides[name]


def seconds(rank: int, name: str, steps: int) -> list[float]:
    """Train some steps. Return the seconds of each, which all ranks begin together."""
    side, batch = _rank.sides[name], MODELS[_rank.model].batch
    found = []
    for _ in range(steps):
        inputs = batch(side.step, rank)
        dist.barrier()
        start = time.perf_counter()
        side.optimizer.zero_grad()
        side.model(*inputs).backward()
        side.optimizer.step()
        found.append(time.perf_counter() - start)
        side.step += 1
    return found


def errors(rank: int, name: str, steps: int) -> list[float]:
    """Train some steps. Return the error of the average of each."""
    meter = _rank.sides[name].meter
    assert meter is not None
    found = []
    meter.is_on = True
    for _ in range(steps):
        seconds(rank, name, 1)
        found.append(meter.error())
    meter.is_on = False
    return found


def sent(rank: int, name: str) -> tuple[int, float]:
    """Return the number of steps so far, and the bytes that this rank has sent in them."""
    stats = _rank.sides[name].handle.stats()
    return stats.steps, stats.steps * (stats.total.wire_bytes or 0.0)


def learned(rank: int, name: str) -> Learned:
    """Return what ``auto`` has found out."""
    hook = cast("Auto", _rank.sides[name].handle.hook)
    control = hook._control
    assert hook.plan is not None
    return Learned(
        hook.plan,
        control and control.problem(),
        [vars(decision) for decision in hook.history],
        hook.metrics(),
        hook._measuring.spent_ns * 1e-9,
    )


def pid(rank: int) -> int:
    """Return the process of this rank."""
    return os.getpid()
