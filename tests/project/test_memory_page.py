"""Hooks keep what docs/memory.md says."""

from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from bench.measured_hooks import MEASURED_HOOKS, name_of
from bench.test_memory import state_bytes
from commhooks.hook.spec import hook_spec

SPECS = [spec for spec in MEASURED_HOOKS if not spec.startswith("torch")]
RANKS = 2


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))


def keep(rank: int, size: int) -> dict[str, int]:
    """Return the bytes of each hook after the steps in which buckets are made and rebuilt."""
    found = {}
    for spec in SPECS:
        model = commhooks.DistributedDataParallel(make_model())
        handle = commhooks.register(model, hook_spec(spec).config)
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(8, 256)).square().mean().backward()
        found[spec] = state_bytes(handle.hook)
    return found


def documented_bytes(hook: str, parameters: list[nn.Parameter]) -> float | None:
    """Return the bytes by the formula in the page, for float32; None if buckets matter."""
    errors = 4 * sum(parameter.numel() for parameter in parameters)
    match hook:
        case "int8" | "int4" | "int2" | "fp8" | "fp4" | "onebit" | "signsgd" | "schedule" | "guard":
            return errors + errors / RANKS
        case "hierarchical":  # int8 between nodes with two ranks, each with half of the gradients
            return (errors + errors / (RANKS // 2)) / 2
        case "topk" | "shared_topk" | "threshold" | "demo" | "push_sum" | "error_feedback":
            return errors
        case "dgc" | "diloco":
            return 2 * errors
        case "powersgd":
            return 4 * sum(powersgd_elements(parameter) for parameter in parameters)
        case "batched_powersgd" | "route":
            return None
        case _:
            return 0


def powersgd_elements(parameter: nn.Parameter, rank: int = 4) -> int:
    """Return the elements of the errors of an (n, m) matrix and of its right factor."""
    if parameter.dim() < 2:
        return 0
    rows, columns = parameter.shape
    return rows * columns + rank * columns


def test_states_are_as_large_as_documented(run_ranks: Any) -> None:
    parameters = list(make_model().parameters())
    for found in run_ranks(keep, RANKS, timeout=300.0):
        for spec, nbytes in found.items():
            documented = documented_bytes(name_of(spec), parameters)
            if documented is not None:
                assert nbytes == pytest.approx(documented, rel=1e-3), spec
