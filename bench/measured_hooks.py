"""Every hook as it is measured, and the tolerance for the error of its first result.

Errors are relative L2 norms. A result of zeros has the error 1, and a hook that sends some of the
right numbers has a smaller one. Unbiased hooks may exceed 1: stochastic rounding, or sending some
numbers n/k times, has a variance that only the mean over steps reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.cluster import Ranks
from commhooks.hook.spec import hook_spec
from commhooks.lab.comparison import remote
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.remote import StepTimes
from reducer import DistributedDataParallel

__all__ = [
    "MEASURED_HOOKS",
    "NOOP_COPYING",
    "TORCHS_HOOKS",
    "MeasuredHook",
    "backwards",
    "entry_of",
]

EXACT = 1e-6  # float32, summed in a different order
HALF = 2**-7  # two roundings of 8 bits
EIGHT_BITS = 0.1
SPARSE = 1.0
UNBIASED = 2.0

_TORCHS: dict[str, tuple[Callable[[], Any], Callable[..., Any], float | None]] = {
    "torch noop": (lambda: None, debugging_hooks.noop_hook, 0.0),
    "torch fp16": (lambda: None, default_hooks.fp16_compress_hook, 0.5),
    "torch powersgd": (
        lambda: powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
        None,
    ),
}
"""The state, the hook, and the share of plain averaging's bytes; None if it is not known."""


class TorchsHook(Entry):
    """torch DDP with a hook of torch's."""

    def wire_bytes(self, gradient_bytes: int, world_size: int) -> int:
        """Return the bytes that a rank sends in a step; 0 if they are not known."""
        share = _TORCHS[self.name][2] or 0.0
        return round(share * TORCH.wire_bytes(gradient_bytes, world_size))

    def wrap(self, module: nn.Module, **options: Any) -> tuple[nn.Module, None]:
        """Wrap the module."""
        model = TorchDDP(module, **options)
        make_state, hook, _ = _TORCHS[self.name]
        model.register_comm_hook(make_state(), hook)
        return model, None


class NoopCopying(Entry):
    """Our wrapper with torch's function: the engine does not know that it changes nothing."""

    def wire_bytes(self, gradient_bytes: int, world_size: int) -> int:
        """Return 0."""
        return 0

    def wrap(self, module: nn.Module, **options: Any) -> tuple[nn.Module, None]:
        """Wrap the module."""
        model = DistributedDataParallel(module, **options)
        model.register_comm_hook(None, debugging_hooks.noop_hook)
        return model, None


@dataclass(frozen=True)
class MeasuredHook:
    """An entry of a comparison, and the ``largest_error`` of its first step.

    ``averages``: the result is the mean over ranks; otherwise this rank's gradients, for hooks that
    average parameters or nothing.
    """

    name: str
    largest_error: float
    averages: bool = True

    @property
    def entry(self) -> Entry:
        """Return the entry."""
        return entry_of(self.name)

    @property
    def hook(self) -> str:
        """Return the name of our hook; empty for torch's."""
        return "" if self.name.startswith("torch") else self.name.partition(":")[0]


def entry_of(name: str) -> Entry:
    """Return what a name stands for: "bare", "torch", a hook of torch's, or a hook of ours."""
    if name in (BARE.name, TORCH.name):
        return BARE if name == BARE.name else TORCH
    return TorchsHook(name) if name in _TORCHS else Entry(name, hook_spec(name).config)


def backwards(ranks: Ranks, entry: Entry, done: int, steps: int) -> tuple[list[float], list[float]]:
    """Time a block of steps, see :mod:`commhooks.lab.comparison.remote`.

    Return the seconds of each backward on the slowest rank, and the bytes that each rank sends.
    """
    blocks = ranks(remote.time_block, entry, done, steps)
    by_step = zip(*(block.times for block in blocks), strict=True)
    seconds = [StepTimes.slowest(step).backward for step in by_step]
    return seconds, [block.wire_bytes for block in blocks]


NOOP_COPYING = NoopCopying("noop, copying")

TORCHS_HOOKS = [MeasuredHook("torch fp16", HALF)]
"""Torch's hooks that run over Gloo on CPUs. Its bf16 hook is refused there, its quantization hooks
raise an IndexError, and its PowerSGD needs all gradients in one bucket."""

MEASURED_HOOKS = [
    MeasuredHook("allreduce", EXACT),
    MeasuredHook("noop", 0.0, averages=False),
    MeasuredHook("fp16", HALF),
    MeasuredHook("bf16", HALF),
    MeasuredHook("fp8", EIGHT_BITS),
    MeasuredHook("int8", EIGHT_BITS),
    MeasuredHook("int4", SPARSE),
    MeasuredHook("fp4", SPARSE),
    MeasuredHook("int2", SPARSE),
    MeasuredHook("natural", SPARSE),
    MeasuredHook("qsgd", UNBIASED),
    MeasuredHook("terngrad", UNBIASED),
    MeasuredHook("onebit", SPARSE),
    MeasuredHook("signsgd", SPARSE),
    MeasuredHook("topk:warmup_steps=0", SPARSE),
    MeasuredHook("demo", SPARSE),
    MeasuredHook("dgc:warmup_steps=0", SPARSE),
    MeasuredHook("threshold:value=1e-7", SPARSE),
    MeasuredHook("randomk", UNBIASED),
    MeasuredHook("powersgd:rank=4,start_step=0", SPARSE),
    MeasuredHook("batched_powersgd:start_step=0", SPARSE),
    MeasuredHook("gossip", 0.0, averages=False),
    MeasuredHook("push_sum", 0.0, averages=False),
    MeasuredHook("local_sgd", 0.0, averages=False),
    MeasuredHook("diloco", 0.0, averages=False),
    MeasuredHook("hierarchical:inner=int8,ranks_per_node=2", EIGHT_BITS),
    MeasuredHook("cast:inner=allreduce", HALF),
    MeasuredHook("error_feedback:inner=bf16", HALF),
    MeasuredHook('route:rules=[["*bias","allreduce"]],default=int8', EIGHT_BITS),
    MeasuredHook('schedule:stages=[[0,"int4"]]', SPARSE),
    MeasuredHook("skip_nonfinite:inner=bf16", HALF),
    MeasuredHook("auto", EXACT),  # until it has measured something
    MeasuredHook("guard:inner=int8,max_error=0.5", EIGHT_BITS),
]
"""Hooks at their defaults, except those that start later; wrappers around a common hook."""


own = {getattr(commhooks.algorithms, kind).name for kind in commhooks.algorithms.__all__}
if missing := own - {measured.hook for measured in MEASURED_HOOKS}:
    raise LookupError(
        f"expected a line for every hook in bench/measured_hooks.py; missing: {sorted(missing)}"
    )
