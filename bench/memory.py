"""The memory that a hook keeps and needs, measured in fresh processes.

See docs/memory.md for the formulas.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch._dynamo  # noqa: F401  # wrappers load it in their first step, the bare module not
from torch import Tensor

from commhooks import CommHook
from commhooks.hook.base import tree
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.comparison.remote import Turn
from commhooks.lab.models import Workload

__all__ = ["Usage", "expected_state_bytes", "usage"]

STEPS = 4  # buckets are rebuilt after the first


@dataclass(frozen=True)
class Usage:
    """Bytes of one rank. ``peak`` and ``between_steps``: resident memory, with gradients freed."""

    gradient_bytes: int
    state_bytes: int
    between_steps: int
    peak: int


def usage(rank: int, model: str, entry: Entry) -> Usage:
    """Measure a process that trains ``model`` for a few steps."""
    workload = Workload(model)
    module = workload.make_module()
    gradient_bytes = sum(parameter.nbytes for parameter in module.parameters())
    turn = Turn(entry, module, workload, rank, first_step=0)
    for _ in range(STEPS):
        turn.step()
        turn.clear()
    gc.collect()
    hook = turn.handle.hook if turn.handle is not None else None
    state = sum(storage_bytes(hook if isinstance(hook, CommHook) else None).values())
    return Usage(gradient_bytes, state, _status("VmRSS"), _status("VmHWM"))


def storage_bytes(hook: CommHook | None) -> dict[int, int]:
    """Return the bytes of the saved state of a hook and its nested hooks."""
    states = [each.state for each in tree(hook)] if hook is not None else []
    tensors = [t for state in states for entry in state.values() for t in entry.values()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def expected_state_bytes(hook: str, model: str, world_size: int) -> float | None:
    """Return the bytes by the formula in docs/memory.md, for float32; None if buckets matter."""
    parameters = list(Workload(model).make_module().parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    errors = 4 * numel
    match hook:
        case "int8" | "int4" | "int2" | "fp8" | "fp4" | "onebit" | "signsgd" | "schedule" | "guard":
            return errors + errors / world_size
        case "hierarchical":  # int8 between nodes with two ranks, each with half of the gradients
            return (errors + errors / (world_size // 2)) / 2
        case "topk" | "threshold" | "demo" | "push_sum" | "error_feedback":
            return errors
        case "dgc" | "diloco":
            return 2 * errors
        case "powersgd":
            return 4 * sum(_powersgd_elements(parameter) for parameter in parameters)
        case "batched_powersgd" | "route":
            return None
        case _:
            return 0


def _powersgd_elements(parameter: Tensor, rank: int = 4) -> int:
    """Return the elements of the errors of an (n, m) matrix and of its right factor."""
    if parameter.dim() < 2:
        return 0
    rows, columns = parameter.flatten(1).shape
    compresses = rows * columns >= 2 * rank * (rows + columns)
    return rows * columns + rank * columns if compresses else 0


def _status(field: str) -> int:
    """Return a field of the status of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return 1024 * int(values[field].split()[0])
