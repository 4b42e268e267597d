"""The functions that rank processes run: wrap models, run and time one backward."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from bench.models import MODELS
from commhooks.comm.stage_groups import StageGroups
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.spec import hook_spec
from reducer import DistributedDataParallel, GradBucket

_models: dict[str, nn.Module] = {}
_handles: dict[str, commhooks.HookHandle] = {}
_inputs: dict[str, torch.Tensor] = {}
_means: list[torch.Tensor] = []  # mean gradients of the bare model, the same in every step
_prepared: tuple[Any, ...] = ()  # what the models were prepared for

TORCH_HOOKS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "torch noop": (lambda: None, debugging_hooks.noop_hook),
    "torch fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "torch powersgd": (
        lambda: powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
}


def wrap(name: str, module: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Wrap ``module`` as ``name`` says.

    "bare": no wrapper. "torch": torch's wrapper, followed by one of its hooks or nothing. "ours":
    our wrapper, followed by a hook specification or nothing.
    """
    if name == "bare":
        return module
    if name.startswith("torch"):
        stock = TorchDDP(module, **options)
        if name in TORCH_HOOKS:
            make_state, hook = TORCH_HOOKS[name]
            stock.register_comm_hook(make_state(), hook)
        return stock
    wrapped = DistributedDataParallel(module, **options)
    if name == "ours noop, copying":
        # The Python function of torch's row: the engine does not know that it changes nothing.
        wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
        return wrapped
    spec = name.removeprefix("ours").strip() or "allreduce"
    _handles[name] = commhooks.register(wrapped, hook_spec(spec).create())
    return wrapped


def example_input(model: str) -> torch.Tensor:
    """Return a random input for the model."""
    factory = MODELS[model]
    return (factory.func if isinstance(factory, functools.partial) else factory).example_input()


def prepare(rank: int, model: str, wrappers: list[str], options: dict[str, Any]) -> int:
    """Create one copy of `model` per wrapper with the same parameters; return its gradient bytes.

    Keeps existing copies if the model and the options are the same.
    """
    global _prepared
    kept = wrappers if _prepared == (model, options) else []
    for name in [name for name in _models if name not in kept]:
        del _models[name]
        _handles.pop(name, None)
    if "bare" not in _models:
        _means.clear()
    for name in wrappers:
        if name not in _models:
            torch.manual_seed(0)
            _models[name] = wrap(name, MODELS[model](), options)
    _prepared = (model, options)
    torch.manual_seed(rank)
    _inputs["x"] = example_input(model)
    module = next(iter(_models.values()))
    return sum(p.numel() * p.element_size() for p in module.parameters())


def use_batch(rank: int, size: int) -> None:
    """Use only the first ``size`` inputs."""
    _inputs["x"] = _inputs["x"][:size]


def backward(rank: int, wrapper: str, set_to_none: bool) -> float:
    """Time one backward, which all ranks start together."""
    model = _models[wrapper]
    model.zero_grad(set_to_none=set_to_none)
    loss = model(_inputs["x"]).square().mean()
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def clear_gradients(wrapper: str) -> None:
    """Free the gradients, as an optimizer's zero_grad() does."""
    _models[wrapper].zero_grad(set_to_none=True)


def hook_of(wrapper: str) -> commhooks.CommHook | None:
    """Return the hook of one of our wrappers, or None for torch's."""
    hook = _handles[wrapper].hook if wrapper in _handles else None
    return hook if isinstance(hook, commhooks.CommHook) else None


def largest_difference(rank: int, one: str, other: str) -> float:
    """Return the largest difference of gradients, relative to the largest gradient."""
    pairs = [
        (_gradient(a), _gradient(b))
        for a, b in zip(_models[one].parameters(), _models[other].parameters(), strict=True)
    ]
    differences = [(a - b).abs().max().item() for a, b in pairs]
    scales = [b.abs().max().item() for _, b in pairs]
    return max(differences) / max(scales)


def error(rank: int, wrapper: str, averages: bool) -> float:
    """Return the relative L2 error of a wrapper's gradients after one backward.

    The reference is the exact mean over ranks or, unless it ``averages``, this rank's gradients.
    """
    bare, model = _models["bare"], _models[wrapper]
    expected = _exact_means() if averages else [_gradient(p).double() for p in bare.parameters()]
    squared_error = squared_norm = 0.0
    for exact, parameter in zip(expected, model.parameters(), strict=True):
        squared_error += (_gradient(parameter) - exact).square().sum().item()
        squared_norm += exact.square().sum().item()
    return float((squared_error / squared_norm) ** 0.5)


def _exact_means() -> list[torch.Tensor]:
    """Return the mean over ranks in float64, computed once because links may be slow."""
    if not _means:
        for parameter in _models["bare"].parameters():
            mean = _gradient(parameter).double()
            dist.all_reduce(mean)
            _means.append(mean.div_(dist.get_world_size()))
    return _means


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def sent(rank: int, wrapper: str) -> tuple[int, float | None]:
    """Return the bytes that this rank sends per step, and the exposed seconds."""
    handle = _handles.get(wrapper)
    if handle is None:  # a hook of torch's, whose traffic is known
        gradient_bytes = sum(p.numel() * p.element_size() for p in _models[wrapper].parameters())
        divisor = 2 if wrapper == "torch fp16" else 1
        return all_reduce_bytes(gradient_bytes // divisor, dist.get_world_size()), None
    total = handle.stats().total
    assert total.wire_bytes is not None
    return round(total.wire_bytes), total.exposed_seconds


def all_reduce_bandwidth(rank: int, nbytes: int) -> float:
    """Return the bytes that this rank sends per second in torch's all-reduce; the best of 5."""
    tensor = torch.zeros(nbytes // 4)
    seconds = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    return all_reduce_bytes(nbytes, dist.get_world_size()) / min(seconds)


# ------------------------------------------------------------------- the cost of awaiting

STAGES = 50
_small = torch.zeros(16)


@dataclass
class ManyStages(commhooks.CommHook):
    """A hook with dependent collectives of 64 bytes."""

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> torch.Tensor:
        """Await STAGES collectives."""
        for _ in range(STAGES):
            await comm.all_reduce(_small)
        return bucket.buffer()


def prepare_stages(rank: int) -> None:
    """Wrap a model with one bucket of one parameter."""
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    commhooks.register(model, ManyStages())
    _models.clear()
    _models["stages"] = model
    awaited_stages(rank)  # connects the stage groups


def awaited_stages(rank: int) -> float:
    """Time a backward whose only bucket awaits all stages."""
    loss = _models["stages"](torch.ones(1, 4)).sum()
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def bare_stages(rank: int, groups: int) -> float:
    """Time the same collectives one after the other, in turn on ``groups`` stage groups.

    Each stage of a hook has its own group, and a group that was idle answers later than one that
    was just used.
    """
    while len(_groups) < groups:
        _groups.append(_maker().open(len(_groups)))
    dist.barrier()
    start = time.perf_counter()
    for stage in range(STAGES):
        _groups[stage % groups].allreduce([_small]).wait()
    return time.perf_counter() - start


_groups: list[dist.ProcessGroup] = []


@functools.cache
def _maker() -> StageGroups:
    assert dist.group.WORLD is not None
    return StageGroups(dist.group.WORLD, token=0)
