"""The hooks that are considered unless the user names others."""

__all__ = ["DEFAULT_CANDIDATES"]

DEFAULT_CANDIDATES = (
    "allreduce",
    "bf16",
    "fp8",
    "int8",
    "int4",
    "powersgd:rank=2,start_step=0",
    "powersgd:rank=4,start_step=0",
    "powersgd:rank=8,start_step=0",
    "topk:density=0.01,warmup_steps=0",
    "topk:density=0.05,warmup_steps=0",
)
"""Specs as on the command line, the exact one first.

Without warm-ups, during which a hook has another error and other bytes than later.
"""
