"""Which ranks share a node, from an option or from the launcher."""

from typing import Any

import pytest
from support.simulated_ranks import Group

from commhooks.comm.nodes import check_nodes, ranks_of_node
from commhooks.errors import CommHookError


def launched(local_size: Any, local_rank: Any) -> dict[str, str]:
    return {"LOCAL_WORLD_SIZE": str(local_size), "LOCAL_RANK": str(local_rank)}


def check(ranks_per_node: int, rank: int, size: int, environment: dict[str, str]) -> int:
    return check_nodes(ranks_per_node, Group(rank, size), environment)  # type: ignore[arg-type]


def test_an_option_goes_before_the_launcher() -> None:
    assert check(0, 5, 8, launched(4, 1)) == 4
    assert check(2, 5, 8, launched(4, 1)) == 2
    assert check(2, 5, 8, {}) == 2


@pytest.mark.parametrize("environment", [{}, launched("many", 0), {"LOCAL_WORLD_SIZE": "4"}])
def test_a_launcher_that_says_nothing(environment: dict[str, str]) -> None:
    with pytest.raises(CommHookError, match=r"numbers in LOCAL_WORLD_SIZE.*ranks_per_node"):
        check(0, 0, 4, environment)


def test_a_launcher_that_numbers_ranks_round_robin() -> None:
    assert check(0, 0, 4, launched(2, 0)) == 2
    with pytest.raises(CommHookError, match=r"\[rank 1\].*one after the other.*local rank 0 of 2"):
        check(0, 1, 4, launched(2, 0))


def test_unequal_nodes() -> None:
    with pytest.raises(CommHookError, match=r"same number of ranks on all.*found 5 ranks, 2 per"):
        check(2, 0, 5, {})
    with pytest.raises(CommHookError, match="found 5 ranks, 3 per node"):
        check(0, 4, 5, launched(3, 1))


def test_ranks_of_a_node_follow_each_other() -> None:
    assert [list(ranks_of_node(rank, 3)) for rank in (0, 2, 3)] == [[0, 1, 2]] * 2 + [[3, 4, 5]]
    assert list(ranks_of_node(7, 1)) == [7]
