"""check_agreement: one text on all ranks, or an error on all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks.comm.agreement import check_agreement
from commhooks.errors import CommHookMismatchError


def agree(rank: int, size: int, texts: list[str]) -> int | str:
    try:
        return check_agreement(dist.group.WORLD, torch.device("cpu"), "color", texts[rank])
    except CommHookMismatchError as error:
        return str(error)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_agreement_gives_a_common_number(run_ranks: Any, size: int) -> None:
    first, second = (run_ranks(agree, size, ["red"] * size) for _ in range(2))
    assert len(set(first)) == 1
    assert isinstance(first[0], int)
    assert first != second


def test_disagreement_names_two_ranks(run_ranks: Any) -> None:
    for rank, message in enumerate(run_ranks(agree, 3, ["red", "red", "blue"])):
        assert message == (
            f"[rank {rank}] expected the same color on all ranks, found on rank 0: red; on rank "
            "2: blue. Nothing was changed."
        )
