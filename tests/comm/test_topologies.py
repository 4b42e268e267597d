"""Rounds of messages: one per rank, none lost, and everybody hears of everybody."""

import typing

import pytest
import torch
from support.mixing import can_be_built, mixing_matrix
from torch import Tensor

from commhooks.comm.topologies import (
    Permutation,
    Push,
    check_topology,
    cycle_length,
    round_at,
)
from commhooks.errors import CommHookError

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 16]
PERMUTATIONS = typing.get_args(Permutation)
TOPOLOGIES = typing.get_args(Push)
STEPS = 24


CASES = [
    (topology, size) for topology in TOPOLOGIES for size in SIZES if can_be_built(topology, size)
]


def mixed(topology: str, size: int, steps: range, seed: int = 0) -> Tensor:
    """What ``steps`` make of the unit vectors: row i is what rank i has of each rank."""
    matrix = torch.eye(size, dtype=torch.float64)
    for step in steps:
        matrix = mixing_matrix(round_at(topology, size, step, seed)) @ matrix
    return matrix


@pytest.mark.parametrize(("topology", "size"), CASES)
def test_every_rank_sends_one_message_to_another(topology: str, size: int) -> None:
    for step in range(STEPS):
        round_ = round_at(topology, size, step)
        assert len(round_.targets) == size
        if size > 1:
            assert all(0 <= to != rank for rank, to in enumerate(round_.targets))
            assert max(round_.targets) < size
        for rank in range(size):
            assert all(round_.targets[source] == rank for source in round_.sources(rank))
        assert sum(len(round_.sources(rank)) for rank in range(size)) == size


@pytest.mark.parametrize(("topology", "size"), CASES)
def test_no_round_changes_the_sum(topology: str, size: int) -> None:
    ones = torch.ones(size, dtype=torch.float64)
    for step in range(STEPS):
        matrix = mixing_matrix(round_at(topology, size, step))
        assert torch.equal(matrix.sum(0), ones), "columns: nothing is lost"
        if topology in PERMUTATIONS:
            assert torch.equal(matrix.sum(1), ones), "rows: what each rank has is an average"


def test_uniform_is_no_permutation() -> None:
    rounds = [round_at("uniform", 5, step) for step in range(STEPS)]
    received = {len(round_.sources(rank)) for round_ in rounds for rank in range(5)}
    assert received >= {0, 1, 2}


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("topology", ["exponential", "hypercube", "dissemination"])
def test_powers_of_two_have_the_exact_mean_after_log2_rounds(
    topology: str, size: int, start: int
) -> None:
    rounds = cycle_length(size)
    assert 2**rounds == size
    first = start * rounds if topology == "dissemination" else start
    mean = torch.full((size, size), 1 / size, dtype=torch.float64)
    assert torch.equal(mixed(topology, size, range(first, first + rounds)), mean)
    assert not torch.equal(mixed(topology, size, range(first, first + rounds - 1)), mean)


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 16])
@pytest.mark.parametrize("topology", ["exponential", "dissemination"])
def test_any_size_hears_of_everyone_within_log2_rounds(topology: str, size: int) -> None:
    rounds = cycle_length(size)
    for cycle in range(3):
        steps = range(cycle * rounds, (cycle + 1) * rounds)
        assert (mixed(topology, size, steps) > 0).all()
    assert not (mixed(topology, size, range(rounds - 1)) > 0).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize(("topology", "size"), CASES)
def test_ranks_come_to_agree(topology: str, size: int) -> None:
    """On the mean for permutations; with push-sum's division by the weights for all.

    The slowest is the ring, where a step leaves cos(π/N) of the difference: 2e-13 in the end.
    """
    values = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    weights = torch.ones(size, dtype=torch.float64)
    matrix = mixed(topology, size, range(1500))
    found = matrix @ values / (matrix @ weights)
    torch.testing.assert_close(found, values.mean().expand(size), rtol=0, atol=1e-8)


@pytest.mark.parametrize("topology", ["dissemination", "random", "uniform"])
def test_partners_change_with_step_and_seed(topology: str) -> None:
    partners = {round_at(topology, 16, step).targets[0] for step in range(200)}
    assert partners == set(range(1, 16))
    assert round_at(topology, 16, 3, seed=1) != round_at(topology, 16, 3)
    assert round_at(topology, 16, 3) == round_at.__wrapped__(topology, 16, 3)


def test_a_hypercube_that_cannot_be_built() -> None:
    for size in (1, 2, 16):
        check_topology("hypercube", size)
    for size in (3, 6, 12):
        with pytest.raises(CommHookError, match=rf"found {size} ranks; 'exponential' and 'diss"):
            check_topology("hypercube", size)
        check_topology("exponential", size)
