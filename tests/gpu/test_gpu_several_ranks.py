"""Several ranks over NCCL, which share devices if there are fewer: see take_device."""

import pytest
from support.several_ranks import RUNS, check


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler
@pytest.mark.parametrize("name", RUNS)
def test_over_nccl(name: str) -> None:
    check(name, "cuda", "nccl")
