"""What the rank processes do: hold wrapped models, run one backward, say how long it took."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from bench.models import MODELS
from commhooks.channels import Channels
from commhooks.wire import all_reduce_bytes
from reducer import DistributedDataParallel, GradBucket

_models: dict[str, nn.Module] = {}
_handles: dict[str, commhooks.HookHandle] = {}
_inputs: dict[str, torch.Tensor] = {}


def _torch_noop(module: nn.Module, **options: Any) -> nn.Module:
    wrapped = TorchDDP(module, **options)
    wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
    return wrapped


def _torch_fp16(module: nn.Module, **options: Any) -> nn.Module:
    wrapped = TorchDDP(module, **options)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def _copying_noop(module: nn.Module, **options: Any) -> nn.Module:
    # The same Python hook as torch's row: the engine cannot know that it changes nothing.
    wrapped = DistributedDataParallel(module, **options)
    wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
    return wrapped


def _ours(label: str, hook: str, **hook_options: Any) -> Callable[..., nn.Module]:
    def wrap(module: nn.Module, **options: Any) -> nn.Module:
        wrapped = DistributedDataParallel(module, **options)
        _handles[label] = commhooks.register(wrapped, hook, **hook_options)
        return wrapped

    return wrap


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "bare": lambda module, **_: module,
    "torch": TorchDDP,
    "torch noop": _torch_noop,
    "torch fp16": _torch_fp16,
    "ours": _ours("ours", "allreduce"),
    "ours noop": _ours("ours noop", "noop"),
    "ours noop, copying": _copying_noop,
    "ours fp16": _ours("ours fp16", "fp16"),
    "ours bf16": _ours("ours bf16", "bf16"),
    "ours int8": _ours("ours int8", "int8"),
    "ours onebit": _ours("ours onebit", "onebit"),
    "ours powersgd": _ours("ours powersgd", "powersgd", rank=4, start_step=0),
    "ours topk": _ours("ours topk", "topk", warmup_steps=0),
}


def prepare(rank: int, model: str, wrappers: list[str], options: dict[str, Any]) -> int:
    """Wrap one copy of `model` per wrapper, from the same start; returns its gradient bytes."""
    _models.clear()
    _handles.clear()
    for name in wrappers:
        torch.manual_seed(0)
        _models[name] = WRAPPERS[name](MODELS[model](), **options)
    torch.manual_seed(rank)
    _inputs["x"] = MODELS[model].example_input()  # type: ignore[attr-defined]
    module = next(iter(_models.values()))
    return sum(p.numel() * p.element_size() for p in module.parameters())


def backward(rank: int, wrapper: str, set_to_none: bool) -> float:
    """Seconds of one backward that all ranks begin together."""
    model = _models[wrapper]
    model.zero_grad(set_to_none=set_to_none)
    loss = model(_inputs["x"]).square().mean()
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def largest_difference(rank: int, one: str, other: str) -> float:
    """Between the gradients of two wrappers, relative to the largest gradient."""
    pairs = zip(_models[one].parameters(), _models[other].parameters(), strict=True)
    differences = []
    scales = []
    for a, b in pairs:
        assert a.grad is not None
        assert b.grad is not None
        differences.append((a.grad - b.grad).abs().max().item())
        scales.append(b.grad.abs().max().item())
    return max(differences) / max(scales)


def error_against_mean(rank: int, wrapper: str) -> float:
    """Relative L2 error of the gradients against the exact mean over ranks, of one backward."""
    bare, model = _models["bare"], _models[wrapper]
    squared_error = squared_norm = 0.0
    for local, got in zip(bare.parameters(), model.parameters(), strict=True):
        assert local.grad is not None
        assert got.grad is not None
        exact = local.grad.double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        squared_error += (got.grad - exact).square().sum().item()
        squared_norm += exact.square().sum().item()
    return float((squared_error / squared_norm) ** 0.5)


def wire_bytes(rank: int, wrapper: str) -> int:
    """Bytes that this rank sends per step."""
    handle = _handles.get(wrapper)
    if handle is None:  # torch's own, whose traffic is known
        gradient_bytes = sum(p.numel() * p.element_size() for p in _models[wrapper].parameters())
        divisor = 2 if wrapper == "torch fp16" else 1
        return all_reduce_bytes(gradient_bytes // divisor, dist.get_world_size())
    sent = handle.stats().total.wire_bytes
    assert sent is not None
    return round(sent)


# ------------------------------------------------------------------- the cost of awaiting

STAGES = 50
_small = torch.zeros(16)


@dataclass
class ManyStages(commhooks.CommHook):
    """Dependent collectives of 64 bytes."""

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> torch.Tensor:
        """As many as STAGES."""
        for _ in range(STAGES):
            await comm.all_reduce(_small)
        return bucket.buffer()


def prepare_stages(rank: int) -> None:
    """One bucket of one parameter."""
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    commhooks.register(model, ManyStages())
    _models.clear()
    _models["stages"] = model
    awaited_stages(rank)  # makes the channels


def awaited_stages(rank: int) -> float:
    """Seconds of a backward whose only bucket awaits the stages."""
    loss = _models["stages"](torch.ones(1, 4)).sum()
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def bare_stages(rank: int, groups: int) -> float:
    """Seconds of the same collectives, one after the other, each on the next of so many groups.

    The groups are what hooks send on. A hook's stages have one each, and a group that was not used
    a moment ago answers later, whoever uses it.
    """
    while len(_channels) < groups:
        _channels.append(_maker().open(len(_channels)))
    dist.barrier()
    start = time.perf_counter()
    for stage in range(STAGES):
        _channels[stage % groups].allreduce([_small]).wait()
    return time.perf_counter() - start


_channels: list[dist.ProcessGroup] = []


@functools.cache
def _maker() -> Channels:
    assert dist.group.WORLD is not None
    return Channels(dist.group.WORLD, token=0)
