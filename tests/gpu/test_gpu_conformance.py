"""Hooks follow the rules of the conformance kit on CUDA tensors, with two ranks on one device."""

import functools

import pytest

import commhooks
from commhooks.testing import check_hook

POWERSGD = {"rank": 2, "min_compression_rate": 1.0, "start_step": 0}
HOOKS: dict[str, dict[str, object]] = {
    "int8": {},
    "topk": {"density": 0.1, "warmup_steps": 2},
    "powersgd": POWERSGD,
    "bf16": {},
}


@pytest.mark.parametrize("name", HOOKS)
def test_conformance(name: str) -> None:
    factory = functools.partial(commhooks.create, name, **HOOKS[name])
    check_hook(factory, device="cuda", timeout=60)
