"""Several ranks over NCCL, which share devices if there are fewer: see take_device."""

import pytest
from support.several_ranks import RUNS, check

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler


@pytest.mark.parametrize("name", [name for name, (_, size) in RUNS.items() if size == 2])
def test_2_ranks(name: str) -> None:
    check(name, "cuda", "nccl")


@pytest.mark.parametrize("name", [name for name, (_, size) in RUNS.items() if size == 4])
def test_4_ranks(name: str) -> None:
    check(name, "cuda", "nccl")
