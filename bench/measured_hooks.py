"""Every hook as it is measured, and torch's.

Errors are relative L2 norms. A result of zeros has the error 1, and a hook that sends some of the
right numbers has a smaller one. Unbiased hooks may exceed 1: stochastic rounding, or sending some
numbers n/k times, has a variance that only the mean over steps reduces.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commhooks import HookHandle, algorithms
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from reducer import DistributedDataParallel
from reducer.host_memory import connect_host
from reducer.native import HostGroup

EXACT = 1e-6  # float32, summed in a different order
HALF = 2**-7  # two roundings of 8 bits
EIGHT_BITS = 0.1
FOUR_BITS = 0.3
SPARSE = 1.0  # that of zeros, which is not allowed
UNBIASED = 2.0


def name_of(spec: str) -> str:
    """Return the name of a hook, without its options."""
    return spec.partition(":")[0]


_BY_LARGEST_ERROR: dict[float | None, tuple[str, ...]] = {
    EXACT: ("allreduce", "auto"),  # auto until it has measured something
    HALF: ("torch fp16", "fp16", "bf16", "cast:inner=allreduce", "error_feedback:inner=bf16",
           "skip_nonfinite:inner=bf16"),
    EIGHT_BITS: ("fp8", "int8", "hierarchical:inner=int8,ranks_per_node=2",
                 'route:rules=[["*bias","allreduce"]],default=int8',
                 "guard:inner=int8,max_error=0.5"),
    FOUR_BITS: ("int4", "fp4", 'schedule:stages=[[0,"int4"]]'),
    SPARSE: ("topk:warmup_steps=0", "shared_topk:warmup_steps=0", "dgc:warmup_steps=0",
             "threshold:value=1e-7", "powersgd:rank=4,start_step=0",
             "batched_powersgd:start_step=0"),
    UNBIASED: ("qsgd", "terngrad", "randomk"),
    None: ("noop", "gossip", "push_sum", "local_sgd", "diloco"),
}  # fmt: skip
MEASURED_HOOKS = {hook: error for error, hooks in _BY_LARGEST_ERROR.items() for hook in hooks}
_NAMED = {name_of(hook) for hook in MEASURED_HOOKS}
MEASURED_HOOKS |= {name: SPARSE for name in algorithms.HOOKS if name not in _NAMED}
"""The hooks at their defaults, except those that start later; wrappers around a common hook.

The values are the largest errors of the first step against the mean. None: the result is this
rank's gradients, for hooks that average parameters or nothing. Of torch's hooks one runs over Gloo
on CPUs with several buckets: see bench/torch_hooks.py.
"""


@dataclass(frozen=True)
class TorchStyleHook(Entry):
    """A hook function in torch's style, on the wrapper ``kind``.

    ``share``: its bytes, as a share of plain averaging's; 0 also if they are not known.
    """

    function: Callable[..., Any] = debugging_hooks.noop_hook
    share: float = 0.0
    make_state: Callable[[], Any] = NoneType
    kind: Callable[..., Any] = TorchDDP

    def wire_bytes(self, gradient_bytes: int, world_size: int) -> int:
        """Return the bytes that a rank sends in a step; 0 if they are not known."""
        return round(self.share * TORCH.wire_bytes(gradient_bytes, world_size))

    def wrap(self, module: nn.Module, **options: Any) -> tuple[nn.Module, None]:
        """Wrap the module."""
        model = self.kind(module, **options)
        model.register_comm_hook(self.make_state(), self.function)
        return model, None


_powersgd = functools.partial(
    powerSGD_hook.PowerSGDState,
    process_group=None,
    matrix_approximation_rank=4,
    start_powerSGD_iter=2,  # the earliest possible step
)
_world = functools.partial(getattr, dist.group, "WORLD")
_of_torch: list[tuple[Any, ...]] = [
    ("noop",),
    ("allreduce", default_hooks.allreduce_hook, 1.0),
    ("fp16", default_hooks.fp16_compress_hook, 0.5),
    ("bf16", default_hooks.bf16_compress_hook, 0.5),
    ("powersgd", powerSGD_hook.powerSGD_hook, 0.0, _powersgd),
    ("batched powersgd", powerSGD_hook.batched_powerSGD_hook, 0.0, _powersgd),
    ("per tensor", quantization_hooks.quantization_pertensor_hook, 0.25, _world),
    ("per channel", quantization_hooks.quantization_perchannel_hook, 0.25, _world),
]
TORCHS = {f"torch {it[0]}": TorchStyleHook(f"torch {it[0]}", None, *it[1:]) for it in _of_torch}
"""Torch's own hooks, by name. Torch registers its bf16 hook only in a build with CUDA and NCCL."""
NOOP_COPYING = TorchStyleHook("noop, copying", kind=DistributedDataParallel)
"""Our wrapper with torch's function: the engine does not know that it changes nothing."""


@dataclass(frozen=True)
class OnHost(Entry):
    """A hook in our wrapper that averages through host memory."""

    def wrap(self, module: nn.Module, **options: Any) -> tuple[nn.Module, HookHandle | None]:
        return super().wrap(module, host_memory=True, **options)


@dataclass(frozen=True)
class HostFloor(Entry):
    """``noop``, and before backward one sum of as many bytes in host memory."""

    def wrap(self, module: nn.Module, **options: Any) -> tuple[nn.Module, HookHandle | None]:
        model, handle = super().wrap(module, **options)
        count = sum(p.numel() for p in module.parameters())
        world = dist.group.WORLD
        assert world is not None
        host = connect_host(world, torch.device("cpu"), 4 * count)
        assert host is not None
        own = host.allocate(count, torch.float32).fill_(1.0)
        places: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(places, host.offset_of(own))
        tensors = host.tensors_at(dict(enumerate(places)), own)
        rank, buckets = dist.get_rank(), [tensor.chunk(len(places)) for tensor in tensors]

        def average(_: torch.Tensor) -> None:
            dist.barrier()
            HostGroup.mean_of([slices[rank] for slices in buckets], buckets[rank][rank])
            dist.barrier()
            for other, slices in enumerate(buckets):
                if other != rank:
                    buckets[rank][other].copy_(slices[other])

        def watch(_: nn.Module, inputs: object, output: torch.Tensor) -> None:
            output.register_hook(average)

        model.register_forward_hook(watch)
        return model, handle


def entry_of(name: str) -> Entry:
    """Return what a name stands for: "bare", "torch", a hook of torch's, or a hook of ours."""
    known = {BARE.name: BARE, TORCH.name: TORCH, **TORCHS}
    return known.get(name) or Entry.of(name)
