"""Samples of parameter grids hold what they promise."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.covering import covering_sample


def combinations_in(cases: list[tuple[int, ...]], strength: int) -> set[object]:
    axes = combinations(range(len(cases[0])), strength)
    return {(chosen, tuple(case[i] for i in chosen)) for chosen in axes for case in cases}


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    strength=st.integers(1, 3),
    data=st.data(),
)
def test_every_combination_is_in_the_sample(sizes, strength, data):
    """Of a full grid, and of one with gaps."""
    grid = list(product(*map(range, sizes)))
    cases = data.draw(st.lists(st.sampled_from(grid), min_size=1, unique=True))
    sample = [cases[index] for index in sorted(covering_sample(cases, strength))]
    strength = min(strength, len(sizes))
    assert combinations_in(sample, strength) == combinations_in(cases, strength)


@pytest.mark.parametrize(("strength", "most"), [(1, 11), (2, 77), (3, 154)])
def test_samples_are_small(strength, most):
    assert len(covering_sample(list(product(range(7), range(11), range(2))), strength)) <= most


def test_nothing_to_sample():
    assert covering_sample([], 2) == set()


@pytest.mark.covering(1)
@pytest.mark.parametrize("left", range(3))
@pytest.mark.parametrize("right", range(3))
def test_cases_outside_of_the_sample_are_exhaustive(request, left, right):
    is_exhaustive = request.node.get_closest_marker("exhaustive") is not None
    assert is_exhaustive == (left != right)
