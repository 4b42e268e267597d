"""The hooks to train with."""

from __future__ import annotations

__all__ = ["ALL", "HOOKS", "PLAIN"]

PLAIN = "allreduce"
"""The hook that all others are compared with."""

HOOKS = (
    "noop",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "topk:warmup_steps=0",
    "powersgd:rank=4,start_step=0",
    "powersgd:rank=8,start_step=0",
    "auto",
)
"""Eight hooks, chosen before they were measured, and ``noop``, which a hook has to beat."""

_AT_DEFAULTS = (
    "bf16 fp16 fp8 fp4 int8 int4 int2 natural qsgd terngrad onebit signsgd "
    "topk dgc demo threshold randomk powersgd batched_powersgd gossip push_sum local_sgd noop"
)
_VARIANTS = (
    # Without the first steps, in which these send everything.
    "topk:warmup_steps=0",
    "dgc:warmup_steps=0",
    "powersgd:rank=1,start_step=0",
    "powersgd:rank=4,start_step=0",
    "powersgd:rank=8,start_step=0",
    "batched_powersgd:rank=4,start_step=0",
    "randomk:error_feedback=true",
    # Wrappers around hooks that compress.
    "cast:inner=allreduce",
    "error_feedback:inner=bf16",
    "hierarchical:inner=int4,ranks_per_node=1",
    'route:rules=[["*bias","allreduce"]],default=int4',
    'schedule:stages=[[0,"allreduce"],[5,"onebit"]]',
    "skip_nonfinite:inner=onebit",
)
ALL = (*_AT_DEFAULTS.split(), *_VARIANTS)
