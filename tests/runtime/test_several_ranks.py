"""The tests of tests/gpu/test_gpu_several_ranks.py, on CPUs over Gloo."""

import pytest
from support.several_ranks import RUNS, check

ON_CUDA = {f"collectives, torch.bool, {size} ranks" for size in (2, 4)}  # Gloo has no such sums


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler
@pytest.mark.parametrize("name", sorted(RUNS.keys() - ON_CUDA))
def test_over_gloo(name: str) -> None:
    check(name, "cpu", "gloo")
