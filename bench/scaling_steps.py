"""What each rank does."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commhooks
from bench.models import Transformer

_models: dict[str, nn.Module] = {}
_handles: dict[str, Any] = {}
_inputs: dict[str, torch.Tensor] = {}


def model() -> nn.Module:
    torch.manual_seed(0)
    whole = Transformer()
    whole.layers = whole.layers[:3]
    return whole


def prepare(rank, hooks, options):
    _models["bare"] = model()
    for label, config in hooks.items():
        _models[label] = commhooks.DistributedDataParallel(model(), **options)
        _handles[label] = commhooks.register(_models[label], config)
    _inputs["x"] = torch.randn(128, 512, generator=torch.Generator().manual_seed(rank))


def backward(rank, label):
    model = _models[label]
    model.zero_grad(set_to_none=True)
    loss = model(_inputs["x"]).square().mean()
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def stats(rank, label):
    s = _handles[label].stats()
    return [[b.gradient_bytes, b.wire_bytes, b.hook_seconds, b.exposed_seconds] for b in (*s.buckets, s.total)]


def inputs():
    return torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
