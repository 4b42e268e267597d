"""The hooks that are considered unless the user names others."""

__all__ = ["DEFAULT_CANDIDATES"]

DEFAULT_CANDIDATES = (
    "allreduce",
    "bf16",
    "fp8",
    "int8",
    "int4",
    "powersgd:rank=2",
    "powersgd:rank=4",
    "powersgd:rank=8",
    "topk:density=0.01",
    "topk:density=0.05",
)
"""Specs as on the command line, the exact one first."""
