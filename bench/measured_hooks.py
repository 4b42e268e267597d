"""Every hook as it is measured, and the tolerance for the error of its first result.

Errors are relative L2 norms. A result of zeros has the error 1, and a hook that sends some of the
right numbers has a smaller one. Unbiased hooks may exceed 1: stochastic rounding, or sending some
numbers n/k times, has a variance that only the mean over steps reduces.
"""

from __future__ import annotations

from dataclasses import dataclass

import commhooks

__all__ = ["MEASURED_HOOKS", "TORCH", "MeasuredHook", "is_known"]

EXACT = 1e-6  # float32, summed in a different order
HALF = 2**-7  # two roundings of 8 bits
EIGHT_BITS = 0.1
SPARSE = 1.0
UNBIASED = 2.0


@dataclass(frozen=True)
class MeasuredHook:
    """A wrapper to time, by its name in ``steps.wrap``, and the ``largest_error`` of its first
    step.

    ``first_step``: the first step in which the hook compresses; torch's PowerSGD averages twice
    before. ``averages``: the result is the mean over ranks; otherwise this rank's gradients, for
    hooks that average parameters or nothing.
    """

    wrapper: str
    largest_error: float
    averages: bool = True
    first_step: int = 0

    @property
    def hook(self) -> str:
        """Return the name of our hook; empty for torch's."""
        return self.wrapper.removeprefix("ours ").partition(":")[0] if self.is_ours else ""

    @property
    def is_ours(self) -> bool:
        """Whether the wrapper is ours."""
        return self.wrapper.startswith("ours ")


def _ours(spec: str, largest_error: float, *, averages: bool = True) -> MeasuredHook:
    return MeasuredHook(f"ours {spec}", largest_error, averages)


TORCH = [
    MeasuredHook("torch", EXACT),
    MeasuredHook("torch fp16", HALF),
]
"""Torch's hooks that run over Gloo on CPUs. Its bf16 hook is refused there, its quantization hooks
raise an IndexError, and its PowerSGD needs all gradients in one bucket."""

TORCH_POWERSGD = MeasuredHook("torch powersgd", SPARSE, first_step=2)

MEASURED_HOOKS = [
    _ours("allreduce", EXACT),
    _ours("noop", 0.0, averages=False),
    _ours("fp16", HALF),
    _ours("bf16", HALF),
    _ours("fp8", EIGHT_BITS),
    _ours("int8", EIGHT_BITS),
    _ours("int4", SPARSE),
    _ours("fp4", SPARSE),
    _ours("int2", SPARSE),
    _ours("natural", SPARSE),
    _ours("qsgd", UNBIASED),
    _ours("terngrad", UNBIASED),
    _ours("onebit", SPARSE),
    _ours("signsgd", SPARSE),
    _ours("topk:warmup_steps=0", SPARSE),
    _ours("demo", SPARSE),
    _ours("dgc:warmup_steps=0", SPARSE),
    _ours("threshold:value=1e-7", SPARSE),
    _ours("randomk", UNBIASED),
    _ours("powersgd:rank=4,start_step=0", SPARSE),
    _ours("batched_powersgd:start_step=0", SPARSE),
    _ours("gossip", 0.0, averages=False),
    _ours("push_sum", 0.0, averages=False),
    _ours("local_sgd", 0.0, averages=False),
    _ours("diloco", 0.0, averages=False),
    _ours("hierarchical:inner=int8,ranks_per_node=2", EIGHT_BITS),
    _ours("cast:inner=allreduce", HALF),
    _ours("error_feedback:inner=bf16", HALF),
    _ours("route:rules=[['*bias','allreduce']],default=int8".replace("'", '"'), EIGHT_BITS),
    _ours("schedule:stages=[[0,'int4']]".replace("'", '"'), SPARSE),
    _ours("skip_nonfinite:inner=bf16", HALF),
    _ours("auto", EXACT),  # until it has measured something
    _ours("guard:inner=int8,max_error=0.5", EIGHT_BITS),
]
"""Hooks at their defaults, except those that start later; wrappers around a common hook."""


def is_known(hook: str) -> bool:
    """Whether ``hook`` is measured."""
    return hook in {measured.hook for measured in MEASURED_HOOKS}


own = [getattr(commhooks.algorithms, kind).name for kind in commhooks.algorithms.__all__]
missing = [name for name in own if not is_known(name)]
if missing:
    raise LookupError(
        f"expected a line for every hook in bench/measured_hooks.py; missing: {missing}"
    )
