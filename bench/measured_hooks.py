"""Every hook as it is measured, and the tolerance for the error of its first result.

Errors are relative L2 norms. A result of zeros has the error 1, and a hook that sends some of the
right numbers has a smaller one. Unbiased hooks may exceed 1: stochastic rounding, or sending some
numbers n/k times, has a variance that only the mean over steps reduces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks import HookHandle
from commhooks.cluster import Ranks
from commhooks.lab.comparison import remote
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.remote import StepTimes
from reducer import DistributedDataParallel

EXACT = 1e-6  # float32, summed in a different order
HALF = 2**-7  # two roundings of 8 bits
EIGHT_BITS = 0.1
SPARSE = 1.0
UNBIASED = 2.0


@dataclass(frozen=True)
class TorchStyleHook(Entry):
    """A hook function in torch's style, on the wrapper ``kind``.

    ``share``: its bytes, as a share of plain averaging's; None if they are not known.
    """

    function: Callable[..., Any] = debugging_hooks.noop_hook
    share: float | None = 0.0
    make_state: Callable[[], Any] = NoneType
    kind: Callable[..., Any] = TorchDDP

    def wire_bytes(self, gradient_bytes: int, world_size: int) -> int:
        """Return the bytes that a rank sends in a step; 0 if they are not known."""
        return round((self.share or 0.0) * TORCH.wire_bytes(gradient_bytes, world_size))

    def wrap(self, module: nn.Module, **options: Any) -> tuple[nn.Module, None]:
        """Wrap the module."""
        model = self.kind(module, **options)
        model.register_comm_hook(self.make_state(), self.function)
        return model, None


torch_powersgd = functools.partial(
    powerSGD_hook.PowerSGDState,
    process_group=None,
    matrix_approximation_rank=4,
    start_powerSGD_iter=2,
)
"""Returns a state of torch's PowerSGD, which compresses from the earliest step on."""
_TORCHS = {
    entry.name: entry
    for entry in (
        TorchStyleHook("torch noop"),
        TorchStyleHook("torch fp16", function=default_hooks.fp16_compress_hook, share=0.5),
        TorchStyleHook(
            "torch powersgd",
            function=powerSGD_hook.powerSGD_hook,
            share=None,
            make_state=torch_powersgd,
        ),
    )
}


@dataclass(frozen=True)
class OnHost(Entry):
    """A hook in our wrapper that averages through host memory."""

    def wrap(self, module: nn.Module, **options: Any) -> tuple[nn.Module, HookHandle | None]:
        return super().wrap(module, host_memory=True, **options)


NOOP_COPYING = TorchStyleHook("noop, copying", kind=DistributedDataParallel)
"""Our wrapper with torch's function: the engine does not know that it changes nothing."""


@dataclass(frozen=True)
class MeasuredHook:
    """An entry of a comparison, and the ``largest_error`` of its first step against the mean.

    None: the result is this rank's gradients, for hooks that average parameters or nothing.
    """

    name: str
    largest_error: float | None

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
    return _TORCHS.get(name) or Entry.of(name)


def backwards(ranks: Ranks, entry: Entry, done: int, steps: int) -> tuple[list[float], list[float]]:
    """Time a block of steps, see :mod:`commhooks.lab.comparison.remote`.

    Return the seconds of each backward on the slowest rank, and the bytes that each rank sends.
    """
    blocks = ranks(remote.time_block, entry, done, steps)
    by_step = zip(*(block.times for block in blocks), strict=True)
    seconds = [StepTimes.slowest(step).backward for step in by_step]
    return seconds, [block.wire_bytes for block in blocks]


TORCHS_HOOKS = [MeasuredHook("torch fp16", HALF)]
"""Torch's hooks that run over Gloo on CPUs. Its bf16 hook is refused there, its quantization hooks
raise an IndexError, and its PowerSGD needs all gradients in one bucket."""

_LARGEST_ERRORS = {
    "allreduce": EXACT,
    "noop": None,
    **dict.fromkeys(("fp16", "bf16"), HALF),
    **dict.fromkeys(("fp8", "int8"), EIGHT_BITS),
    **dict.fromkeys(("int4", "fp4", "int2", "natural"), SPARSE),
    **dict.fromkeys(("qsgd", "terngrad"), UNBIASED),
    **dict.fromkeys(("onebit", "signsgd", "topk:warmup_steps=0"), SPARSE),
    **dict.fromkeys(("shared_topk:warmup_steps=0", "demo", "dgc:warmup_steps=0"), SPARSE),
    "threshold:value=1e-7": SPARSE,
    "randomk": UNBIASED,
    **dict.fromkeys(("powersgd:rank=4,start_step=0", "batched_powersgd:start_step=0"), SPARSE),
    **dict.fromkeys(("gossip", "push_sum", "local_sgd", "diloco"), None),
    "hierarchical:inner=int8,ranks_per_node=2": EIGHT_BITS,
    **dict.fromkeys(("cast:inner=allreduce", "error_feedback:inner=bf16"), HALF),
    'route:rules=[["*bias","allreduce"]],default=int8': EIGHT_BITS,
    'schedule:stages=[[0,"int4"]]': SPARSE,
    "skip_nonfinite:inner=bf16": HALF,
    "auto": EXACT,  # until it has measured something
    "guard:inner=int8,max_error=0.5": EIGHT_BITS,
}
MEASURED_HOOKS = [MeasuredHook(name, error) for name, error in _LARGEST_ERRORS.items()]
"""Hooks at their defaults, except those that start later; wrappers around a common hook."""


own = {getattr(commhooks.algorithms, kind).name for kind in commhooks.algorithms.__all__}
if missing := own - {measured.hook for measured in MEASURED_HOOKS}:
    raise LookupError(
        f"expected a line for every hook in bench/measured_hooks.py; missing: {sorted(missing)}"
    )
