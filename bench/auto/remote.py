"""What each rank does: it trains a copy of the model with each setting, in blocks of steps."""

import copy
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from bench.auto.points import AUTO, MODELS, Model
from commhooks.adapters.wrapper import wrap
from commhooks.algorithms.wrappers.table import residual_of
from commhooks.algorithms.wrappers.trial import relative_error
from commhooks.hook.spec import hook_spec
from commhooks.planning import Plan

_Result = TypeVar("_Result")


class Training:
    """A copy of a model that is trained with a hook, by SGD."""

    def __init__(self, kind: Model, module: nn.Module, setting: str) -> None:
        self._kind, self._steps = kind, 0
        exact = {"exact": list(kind.exact)} if setting == AUTO else {}
        self._hook: Any = commhooks.create(hook_spec(setting).config, **exact)
        self._model: Any = wrap(copy.deepcopy(module))
        self._optimizer = torch.optim.SGD(self._model.parameters(), kind.rate)
        self._handle = commhooks.register(self._model, self._hook)
        torch.manual_seed(1 + dist.get_rank())

    def seconds(self, steps: int) -> list[float]:
        """Train some steps, which all ranks begin together. Return the seconds of each."""
        return [self._step() for _ in range(steps)]

    def errors(self, steps: int) -> list[float]:
        """Train some steps. Return the error of the average of each, as ``auto`` measures it."""
        return [self._error() for _ in range(steps)]

    def sent(self) -> tuple[int, float]:
        """Return the number of steps so far, and the bytes that this rank has sent in them."""
        stats = self._handle.stats()
        return stats.steps, stats.steps * (stats.total.wire_bytes or 0.0)

    def learned(self) -> tuple[Plan, list[dict[str, Any]], dict[str, float], float]:
        """Return the plan of ``auto``, its history and metrics, and the seconds of measuring."""
        hook = self._hook
        spent = hook._measuring._spent_ns * 1e-9
        return hook.plan, [vars(each) for each in hook.history], hook.metrics(), spent

    def _step(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self._backward()
        self._optimizer.step()
        self._steps += 1
        return time.perf_counter() - start

    def _backward(self) -> None:
        self._optimizer.zero_grad()
        self._model(*self._kind.batch(self._steps, dist.get_rank())).backward()

    def _error(self) -> float:
        """Train a step. Return |average - exact| / |exact| of all its numbers.

        The exact average is that of gradient plus residual, before the step.
        """
        parameters = dict(self._model.module.named_parameters())
        with self._model.no_sync():
            self._backward()
        exact = {name: self._exact(name, p.grad.clone()) for name, p in parameters.items()}
        self._step()
        differences = {name: p.grad - exact[name] for name, p in parameters.items()}
        wrong, right = (
            sum(each.double().square().sum().item() for each in of.values())
            for of in (differences, exact)
        )
        return relative_error(wrong, right)

    def _exact(self, name: str, gradient: Tensor) -> Tensor:
        size = dist.get_world_size()
        residual = residual_of(self._hook, name, gradient, size)
        if residual is not None:
            gradient += residual.as_strided(gradient.shape, gradient.stride())
        dist.all_reduce(gradient.div_(size))
        return gradient


class Trainings:
    """The trainings of this rank, by their settings."""

    def __init__(self, rank: int, model: str) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())  # as torchrun does
        self._kind = MODELS[model]
        self._module = self._kind.make()
        self._trainings: dict[str, Training] = {}

    def add(self, setting: str) -> None:
        """Begin a training."""
        self._trainings[setting] = Training(self._kind, self._module, setting)

    def drop(self, setting: str) -> None:
        """Forget a training."""
        del self._trainings[setting]

    def do(self, setting: str, method: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a method of a training."""
        return method(self._trainings[setting], *arguments)


def cpu_seconds(_rank: int) -> float:
    """Return the CPU seconds that this process has used."""
    return time.process_time()
