"""check_same: one text on all ranks, or an error on all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import gathered

import commhooks
from commhooks.adapters.adapter import check_same
from commhooks.errors import CommHookMismatchError


def agree(rank: int, size: int, texts: list[str]) -> int | str:
    try:
        return check_same(dist.group.WORLD, torch.device("cpu"), "color", texts[rank])
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


def do_different_things(rank: int, size: int) -> list[str]:
    model = commhooks.DistributedDataParallel(torch.nn.Linear(3, 2), hook="int8")
    handle = commhooks.handle_of(model)
    assert handle is not None
    saved = handle.state_dict()
    calls = [
        lambda: handle.load_state_dict(saved),
        lambda: commhooks.DistributedDataParallel(torch.nn.Linear(5, 1)),
        lambda: handle.replace("topk"),
    ]
    found = []
    for first, second in [(0, 1), (2, 0), (1, 2)]:
        with pytest.raises(CommHookMismatchError) as raised:
            calls[first if rank == 0 else second]()
        found.append(str(raised.value))
    for _ in range(3):  # nothing has changed
        model.zero_grad()
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
    gradients = gathered(model.module.weight.grad)
    assert all(torch.equal(gradients[0], theirs) for theirs in gradients)
    torch.testing.assert_close(gradients[0], torch.full((2, 3), 2.0), rtol=0.01, atol=0.0)
    return found


def test_ranks_in_different_calls_raise_with_both(run_ranks: Any) -> None:
    load, wrap, replace = (
        "the loading of a saved state",
        "the comparison of the ranks' parameters",
        "the comparison of the ranks' hook and options, which all ranks have to set together,",
    )
    for rank, messages in enumerate(run_ranks(do_different_things, 3)):
        for message, (first, second) in zip(
            messages, [(load, wrap), (replace, load), (wrap, replace)], strict=True
        ):
            assert message == (
                f"[rank {rank}] expected the same call on all ranks, found on rank 0: {first}; on "
                f"rank 1: {second}. Make these calls in the same order on all ranks"
            )
