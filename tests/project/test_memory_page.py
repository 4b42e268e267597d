"""Hooks keep what docs/memory.md says."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from bench.measured_hooks import MEASURED_HOOKS, name_of
from bench.test_memory import state_bytes
from commhooks import CommHook
from commhooks.hook.spec import hook_spec

SPECS = [spec for spec in MEASURED_HOOKS if not spec.startswith("torch")]
RANKS = 2
PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


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


def documented_formulas() -> dict[str, str]:
    """Return what the first table of the page says of the state of each hook, up to its reasons."""
    formulas = {}
    for row in PAGE.read_text().partition("\n## ")[0].splitlines():
        if row.startswith("| `"):
            _, names, state, _ = row.split("|")
            formula = re.split("[:;,]| bytes", state)[0].strip().replace("·", "*")
            formulas |= dict.fromkeys(re.findall(r"`(\w+)`", names), formula)
    return formulas


def documented_bytes(hook: CommHook, shapes: list[torch.Size], ranks: int = RANKS) -> float:
    """Return the bytes by the formula in the page, for float32."""
    formula = documented_formulas()[hook.name]
    if formula == "the state of their inner hooks":
        share = 1.0
        if hook.name == "hierarchical":  # here one node, each rank with half of the gradients
            ranks, share = 1, 1 / RANKS
        elif hook.name == "route":  # here biases are averaged exactly
            shapes = [shape for shape in shapes if len(shape) > 1]
        inner = hook.nested().values() if hook.name != "auto" else ()  # which has chosen none yet
        return share * sum(documented_bytes(each, shapes, ranks) for each in inner)
    if formula == "nothing":
        return 0
    if "n*m" in formula:  # for each matrix; r is the default
        matrices = [dict(zip("nm", shape, strict=True), r=4) for shape in shapes if len(shape) > 1]
        return sum(eval(formula, values) for values in matrices)
    nbytes: float = eval(formula, {"G": 4 * sum(map(math.prod, shapes)), "N": ranks})
    return nbytes


def test_states_are_as_large_as_documented(run_ranks: Any) -> None:
    shapes = [parameter.shape for parameter in make_model().parameters()]
    for found in run_ranks(keep, RANKS, timeout=300.0):
        for spec, nbytes in found.items():
            if name_of(spec) != "batched_powersgd":  # whose matrices depend on the buckets
                documented = documented_bytes(commhooks.create(hook_spec(spec).config), shapes)
                assert nbytes == pytest.approx(documented, rel=1e-3), spec
