"""Run each of torch's tests of DistributedDataParallel on torch's wrapper, then on the project's.

A test that torch's wrapper does not pass here is skipped.
"""

from __future__ import annotations

import unittest

import pytest

from torch_suite import torch_tests
from torch_suite.private import REASONS


def why_not(case: unittest.TestCase) -> str:
    """Run a test. Return why it did not pass, or an empty text."""
    result = unittest.TestResult()
    case.run(result)
    for _, text in [*result.errors, *result.failures, *result.skipped]:
        return text
    return ""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=REASONS[name]) if name in REASONS else [])
        for name in torch_tests.names_of_tests()
    ],
)
def test_of_torch(name: str) -> None:
    if problem := why_not(torch_tests.OfTorch(name)):
        pytest.skip("torch's wrapper does not pass: " + problem.strip().splitlines()[-1])
    if problem := why_not(torch_tests.OfOurs(name)):
        pytest.fail(problem, pytrace=False)
