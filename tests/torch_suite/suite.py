"""Run each of torch's tests of DistributedDataParallel on torch's wrapper, then on the project's.

A test that torch's wrapper does not pass here is skipped.
"""

from __future__ import annotations

import pytest

from torch_suite.private import REASONS
from torch_suite.torch_tests import OursOnCpu, TorchOnCpu, TorchTest, all_tests


@pytest.mark.parametrize(
    "test",
    [
        pytest.param(
            test,
            id=test.id,
            marks=pytest.mark.xfail(reason=REASONS[test.id]) if test.id in REASONS else [],
        )
        for test in all_tests()
    ],
)
def test_of_torch(test: TorchTest) -> None:
    if problem := test.why_not(TorchOnCpu):
        lines = problem.strip().splitlines()
        error = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        pytest.skip(f"torch's wrapper does not pass: {error}")
    if problem := test.why_not(OursOnCpu):
        pytest.fail(problem, pytrace=False)
