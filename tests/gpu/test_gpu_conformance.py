"""Every hook follows the rules of the conformance kit on CUDA tensors, two ranks on one device."""

import functools

import pytest
from support.conforming_hooks import CASES

import commhooks
from commhooks.testing import check_hook


@pytest.mark.parametrize(("name", "options"), CASES)
def test_conformance(name: str, options: dict[str, object]) -> None:
    check_hook(functools.partial(commhooks.create, name, **options), device="cuda", timeout=60)
