"""Hooks that cannot work raise at registration, on every rank, and the model works afterwards."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
import reducer.agreement
from commhooks import extensions
from commhooks.adapters import handle
from commhooks.runtime import replays

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "option out of range": ("powersgd", {"rank": 0}, "'rank'.*>= 1; found 0"),
    "block size that is not a multiple": ("int8", {"block_size": 100}, "'block_size'.*100"),
    "unknown format": ("fp8", {"format": "e3m4"}, "'format'.*e4m3.*e3m4"),
    "density that keeps nothing": ("topk", {"density": 0.0}, "'density'.*> 0.*found 0"),
    "density of randomk": ("randomk", {"density": 0.0}, "'density'.*> 0.*found 0"),
    "infinite outer learning rate": ("diloco", {"outer_lr": float("inf")}, "'outer_lr'.*< inf"),
    "infinite rate": ("powersgd", {"min_compression_rate": float("inf")}, "_rate'.*< inf"),
    "threshold that keeps nothing": ("threshold", {"value": float("inf")}, "'value'.*< inf"),
    "topology that cannot be built": (
        "gossip",
        {"topology": "hypercube"},
        "power of two.*found 3 ranks",
    ),
    "topology that is unknown": ("push_sum", {"topology": "star"}, "'topology'.*star"),
    "backend that lacks the collectives": ("only_nccl", {}, "works on nccl.*gloo"),
    "unequal nodes": (
        "hierarchical",
        {"inner": "bf16", "ranks_per_node": 2},
        "found 3 ranks, 2 per node",
    ),
    "unequal nodes in local SGD": ("local_sgd", {"ranks_per_node": 2}, "found 3 ranks, 2 per node"),
    "more fragments than parameters": ("diloco", {"fragments": 9}, "fragments=9"),
    "route rule that matches nothing": (
        "route",
        {"rules": [["head.*", "bf16"]], "default": "allreduce"},
        r"rule 'head\.\*' matches no parameter",
    ),
    "route without a rule for a parameter": (
        "route",
        {"rules": [["weight", "bf16"]]},
        "no rule matches 'bias'",
    ),
    "stages out of order": ("schedule", {"stages": [[5, "bf16"]]}, "ascend from 0, found"),
    "error feedback around error feedback": (
        "error_feedback",
        {"inner": "topk"},
        "tells its contribution",
    ),
}


class OnlyNccl(commhooks.CommHook):
    """A hook whose collectives Gloo does not have."""

    name = "only_nccl"
    backends = ("nccl",)

    async def reduce(self, bucket: Any, comm: Any) -> torch.Tensor:
        raise AssertionError("must have raised at registration")


def raise_for_all_cases(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(8, 8))
    for hook, options, message in CASES.values():
        with pytest.raises(commhooks.CommHookError, match=message):
            commhooks.register(model, OnlyNccl() if hook == "only_nccl" else hook, **options)
    itself = commhooks.create("schedule", stages=[[0, "bf16"]])
    itself.stages = [(0, itself)]  # type: ignore[attr-defined]
    with pytest.raises(commhooks.CommHookError, match="contains itself"):
        commhooks.register(model, itself)
    commhooks.register(model, "bf16")
    model(torch.ones(1, 8)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(8, 8))


def test_every_case_raises_at_registration(run_ranks: Any) -> None:
    run_ranks(raise_for_all_cases, 3)


def raise_for_ranks(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8), nn.Linear(8, 64))
    )
    for hook, highest, largest in [
        ("powersgd", 13, r"48 x 64 \(0\.weight\)"),
        ("batched_powersgd", 15, "all parameters in one bucket"),
    ]:
        message = f"rank of at most {highest}, found {highest + 2}, .*the largest are .*{largest}"
        with pytest.raises(commhooks.CommHookError, match=message):
            commhooks.register(model, hook, rank=highest + 2)
        commhooks.register(model, hook, rank=highest).remove()
    with pytest.raises(commhooks.CommHookError, match="rank of at most 48, found 49"):
        commhooks.register(model, "powersgd", rank=49, min_compression_rate=0.0)
    tiny = commhooks.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    with pytest.raises(commhooks.CommHookError, match="rank of at most 3, found 4"):
        commhooks.register(tiny, "powersgd", rank=4)
    no_matrices = [["*.bias", {"name": "powersgd", "rank": 1000}]]
    commhooks.register(tiny, "route", rules=no_matrices, default="allreduce").remove()


def test_a_rank_above_the_size_of_every_matrix_raises(run_ranks: Any) -> None:
    run_ranks(raise_for_ranks, 2)


def train_small(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 64)))
    commhooks.register(model, "powersgd", rank=3, min_compression_rate=0.0, start_step=0)
    model(torch.full((1, 2), float(rank + 1))).sum().backward()
    first = model.module[0]
    expected = 1.5 * model.module[1].weight.sum(0)[:, None].expand(3, 2)
    torch.testing.assert_close(first.weight.grad, expected)


def test_a_rank_above_the_size_of_one_matrix_is_clamped(run_ranks: Any) -> None:
    """One rank applies to matrices of all sizes; small matrices are then averaged exactly."""
    run_ranks(train_small, 2)


def train_tiny(rank: int, size: int) -> None:
    cases: list[tuple[int, dict[str, Any]]] = [(2, {"rank": 2}), (8, {})]
    for width, options in cases:
        model = commhooks.DistributedDataParallel(nn.Linear(width, 3))
        commhooks.register(model, "powersgd", start_step=0, **options)
        model(torch.full((1, width), float(rank))).sum().backward()
        torch.testing.assert_close(model.module.weight.grad, torch.full((3, width), 0.5))


def test_a_model_without_compressible_matrices_is_averaged_exactly(run_ranks: Any) -> None:
    """The rank is valid: no matrix of these small models could be compressed by any rank."""
    run_ranks(train_tiny, 2)


def register_late(rank: int, size: int) -> list[str]:
    told: list[str] = []
    store = dist.distributed_c10d._get_default_store()

    def tell(text: str, **_: Any) -> None:
        told.append(text)
        store.set("told", "")

    model = commhooks.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer.agreement, "_PATIENCE_SECONDS", 60.0 if rank else 0.01)
        patch.setattr(reducer.agreement.warnings, "warn", tell)
        if rank == 1:
            store.wait(["told"])
        commhooks.register(model, "int8")
    return told


def test_a_rank_that_waits_for_others_says_for_which(run_ranks: Any) -> None:
    """A rank that never registers would be noticed only at the time-out of the group."""
    (text,), *others = run_ranks(register_late, 2)
    assert text.startswith("[rank 0] the comparison of the ranks' hook and options, which all")
    assert "has waited 0.01 s for ranks [1]. If their program leaves it out, call it on all" in text
    assert others == [[]]


def mix_installations(rank: int, size: int) -> None:
    if rank == 1:
        handle.KERNELS = SimpleNamespace(is_compiled=False, name="commhooks._C")
    try:
        with pytest.raises(commhooks.CommHookMismatchError, match=r"int8.*without commhooks\._C"):
            commhooks.register(commhooks.DistributedDataParallel(nn.Linear(2, 2)), "int8")
    finally:
        handle.KERNELS = extensions.KERNELS


def mix_switches(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(2, 2))
    with (
        patch.object(replays, "MAX_CAPTURES", 3 * rank),
        pytest.raises(commhooks.CommHookMismatchError, match=r"int8.*with COMMHOOKS_CUDA_GRAPHS=1"),
    ):
        commhooks.register(model, "int8")


def test_all_ranks_replay_or_none(run_ranks: Any) -> None:
    """Only steps with replays end with an all-reduce, which would meet another collective."""
    run_ranks(mix_switches, 2)


def test_all_ranks_have_the_extension_or_none(run_ranks: Any) -> None:
    """They send in different ways, so a job of both would hang."""
    run_ranks(mix_installations, 2)
