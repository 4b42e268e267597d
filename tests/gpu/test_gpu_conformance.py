"""Every hook follows the rules of the conformance kit on CUDA tensors, two ranks on one device."""

import functools

import pytest
from support.conforming_hooks import CASES
from support.several_ranks import PATIENCE

import commhooks
from commhooks.testing import check_hook


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_conformance(name: str, options: dict[str, object], backend: str) -> None:
    factory = functools.partial(commhooks.create, name, **options)
    check_hook(factory, device="cuda", backend=backend, timeout=PATIENCE)
