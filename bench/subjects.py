"""Every hook, as it is measured, and how far from the exact mean its first result may be.

Errors are relative L2 norms. A result of zeros has the error 1; a hook that sends the right
numbers, but few of them, stays below. Unbiased ones may exceed that: rounding up or down at random,
or sending some numbers n/k times, has a variance that only the mean over steps makes up for.
"""

from __future__ import annotations

from dataclasses import dataclass

import commhooks

__all__ = ["SUBJECTS", "TORCH", "Subject", "is_known"]

EXACT = 1e-6  # float32, summed in another order
HALF = 2**-7  # two roundings of 8 bits
EIGHT_BITS = 0.1
SPARSE = 1.0
UNBIASED = 2.0


@dataclass(frozen=True)
class Subject:
    """What is timed, by its name in ``steps.wrap``; ``largest_error`` of its first step.

    ``first_step``: the first that does what the name says; torch's PowerSGD averages twice before.
    ``averages``: the result is to be the mean over ranks; else this rank's own gradients, as of
    hooks that average parameters or nothing.
    """

    wrapper: str
    largest_error: float
    averages: bool = True
    first_step: int = 0

    @property
    def hook(self) -> str:
        """The name of ours; empty for torch's."""
        return self.wrapper.removeprefix("ours ").partition(":")[0] if self.is_ours else ""

    @property
    def is_ours(self) -> bool:
        """Whether it runs on our engine."""
        return self.wrapper.startswith("ours ")


def _ours(spec: str, largest_error: float, *, averages: bool = True) -> Subject:
    return Subject(f"ours {spec}", largest_error, averages)


TORCH = [
    Subject("torch", EXACT),
    Subject("torch fp16", HALF),
]
"""Torch's own hooks that run over Gloo on CPUs: its bf16 hook is refused there, its quantizing ones
raise an IndexError, and its PowerSGD needs all gradients in one bucket."""

TORCH_POWERSGD = Subject("torch powersgd", SPARSE, first_step=2)

SUBJECTS = [
    _ours("allreduce", EXACT),
    _ours("noop", 0.0, averages=False),
    _ours("fp16", HALF),
    _ours("bf16", HALF),
    _ours("fp8", EIGHT_BITS),
    _ours("int8", EIGHT_BITS),
    _ours("int4", SPARSE),
    _ours("natural", SPARSE),
    _ours("qsgd", UNBIASED),
    _ours("terngrad", UNBIASED),
    _ours("onebit", SPARSE),
    _ours("signsgd", SPARSE),
    _ours("topk:warmup_steps=0", SPARSE),
    _ours("dgc:warmup_steps=0", SPARSE),
    _ours("threshold:value=1e-7", SPARSE),
    _ours("randomk", UNBIASED),
    _ours("powersgd:rank=4,start_step=0", SPARSE),
    _ours("batched_powersgd:start_step=0", SPARSE),
    _ours("gossip", 0.0, averages=False),
    _ours("push_sum", 0.0, averages=False),
    _ours("local_sgd", 0.0, averages=False),
    _ours("hierarchical:inner=int8,ranks_per_node=2", EIGHT_BITS),
    _ours("cast:inner=allreduce", HALF),
    _ours("error_feedback:inner=bf16", HALF),
    _ours("route:rules=[['*bias','allreduce']],default=int8".replace("'", '"'), EIGHT_BITS),
    _ours("schedule:stages=[[0,'int4']]".replace("'", '"'), SPARSE),
    _ours("skip_nonfinite:inner=bf16", HALF),
]
"""At their defaults, but for what only starts later; wrappers around a common hook."""


def is_known(hook: str) -> bool:
    """Whether ``hook`` is among those measured."""
    return hook in {subject.hook for subject in SUBJECTS}


own = [getattr(commhooks.algorithms, kind).name for kind in commhooks.algorithms.__all__]
missing = [name for name in own if not is_known(name)]
if missing:
    raise LookupError(f"hooks to be measured that have no line in bench/subjects.py: {missing}")
