"""Unused parameters, static graphs, and parameters that are used more than once."""

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from commhooks.testing import run_ranks
from reducer import DistributedDataParallel

WRAPPERS = (DistributedDataParallel, TorchDDP)


class Branches(nn.Module):
    """Uses the branches that the caller selects."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        x = self.trunk(x)
        return sum((self.branches[index](x) for index in used), start=x)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b)


# The branches that each rank uses: [step][rank].
PLANS: dict[str, list[list[list[int]]]] = {
    "all used": [[[0, 1, 2], [0, 1, 2]]] * 3,
    "unused on one rank": [[[0, 1], [1, 2]], [[0], [0, 2]], [[2], [1]]],
    "unused on all ranks": [[[0], [0]], [[1], [1]], [[], []]],
    "changing": [[[0, 1, 2], [0]], [[], [1, 2]], [[0, 2], [0, 2]], [[1], []]],
}


def unused(rank: int, world_size: int, plan: str, view: bool, set_to_none: bool) -> None:
    runs = []
    for wrapper in WRAPPERS:
        model = wrapper(
            Branches(),
            find_unused_parameters=True,
            gradient_as_bucket_view=view,
            bucket_cap_mb=0.0001,
        )
        seen: list[torch.Tensor | None] = []
        for step, used in enumerate(PLANS[plan]):
            x = torch.full((2, 4), float(rank + step + 1))
            model(x, used[rank]).square().sum().backward()
            seen += gradients(model)
            model.zero_grad(set_to_none=set_to_none)
        runs.append(seen)
    assert_same(*runs)


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_unused_parameters(plan: str, view: bool, set_to_none: bool) -> None:
    run_ranks(unused, 2, plan, view, set_to_none)


def globally_unused(rank: int, world_size: int, view: bool) -> None:
    model = DistributedDataParallel(
        Branches(), find_unused_parameters=True, gradient_as_bucket_view=view
    )
    x = torch.full((2, 4), float(rank + 1))
    model(x, [0, 1, 2]).sum().backward()
    weight = model.module.branches[2].weight
    assert weight.grad is not None
    weight.grad.copy_(torch.arange(16.0).view(4, 4) * (rank + 1))  # differs between ranks
    before = weight.grad.clone()
    model(x, [0]).sum().backward()  # accumulates in the other parameters
    assert torch.equal(weight.grad, before)


@pytest.mark.parametrize("view", [False, True])
def test_gradients_of_globally_unused_parameters_do_not_change(view: bool) -> None:
    run_ranks(globally_unused, 2, view)


def used_in_no_sync_only(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    plain = Branches()
    for step in range(3):
        inputs = [torch.full((2, 4), float(peer + step + 1)) for peer in range(world_size)]
        with model.no_sync():
            model(inputs[rank], [1]).sum().backward()
        model(inputs[rank], [0]).sum().backward()
        for x in inputs:
            (plain(x, [1]).sum().div(world_size) + plain(x, [0]).sum().div(world_size)).backward()
        assert_same(gradients(model), gradients(plain))
        model.zero_grad()
        plain.zero_grad()


def used_in_no_sync_after_a_conversion(rank: int, world_size: int) -> None:
    """It gives parameters other nodes of the graph."""
    model = DistributedDataParallel(Branches(1), find_unused_parameters=True)
    x = torch.full((2, 4), rank + 1.0)
    for _ in range(3):
        model(x, [0]).sum().backward()
        model.module.double().float()
        model.zero_grad()
        with model.no_sync():
            model(x, [0]).sum().backward()
        model(x, []).sum().backward()
        (found,) = (p.grad for p in model.module.branches[0].parameters() if p.dim() == 1)
        assert found.tolist() == [2.0] * 4
        found = model.module.branches[0].weight.grad
        both = [torch.empty_like(found) for _ in range(world_size)]
        dist.all_gather(both, found)
        assert both[0].equal(both[1])


def test_parameters_used_only_in_no_sync_are_averaged_after_a_conversion() -> None:
    run_ranks(used_in_no_sync_after_a_conversion, 2)


def test_parameters_used_only_in_no_sync_are_averaged_later() -> None:
    # Torch does not average such a gradient, so that models differ afterwards.
    run_ranks(used_in_no_sync_only, 2)


def nothing_used_on_rank_1(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    plain = Branches()
    if rank == 1:
        offset = torch.ones(2, 4, requires_grad=True)
        model.module.forward = lambda x, used: offset * x
    for step in range(3):
        x = torch.full((2, 4), step + 1.0)
        model(x, [0]).sum().backward()
        plain(x, [0]).sum().div(world_size).backward()  # what rank 1 adds is zero
        assert_same(gradients(model), gradients(plain))
        model.zero_grad()
        plain.zero_grad()


def test_a_rank_that_uses_no_parameter_takes_part() -> None:
    run_ranks(nothing_used_on_rank_1, 2)


# ----------------------------------------------------------------------- unfinished reductions


def unfinished(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.0001)
    x = torch.full((2, 4), float(rank + 1))

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(x, [0, 1, 2]).sum().backward()
        assert model.module.trunk.weight.grad is not None
        return model.module.trunk.weight.grad.clone()

    expected = gradient()
    model(x, [0, 2]).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model(x, [0, 1, 2])
    text = str(caught.value)
    assert f"[Rank {rank}]" in text
    for part in (
        f"did not receive grad for rank {rank}: branches.1.weight (index ",
        "branches.1.bias",
        f"Parameter indices which did not receive grad for rank {rank}: ",
        "passing the keyword argument `find_unused_parameters=True`",
        "`forward` function outputs participate in calculating loss",
    ):
        assert part in text
    assert "branches.2" not in text
    assert torch.equal(gradient(), expected)


def test_parameters_without_gradient_are_named_and_the_next_step_works() -> None:
    run_ranks(unfinished, 2)


class CheckpointsOneLayerTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.times = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.again, x, use_reentrant=True)
        return x


def twice_in_one_graph(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(CheckpointsOneLayerTwice())
    x = torch.full((2, 4), float(rank + 1), requires_grad=True)
    with pytest.raises(RuntimeError, match=r"ready only once: parameter again.(weight|bias) "):
        model(x).sum().backward()
    model.module.times = 1
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.module.again.bias.grad, torch.full((4,), 2.0))


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_marked_twice_is_named_and_the_next_step_works() -> None:
    run_ranks(twice_in_one_graph, 2)


# ------------------------------------------------------------------------------- static graph


class Reuse(nn.Module):
    """Uses one parameter several times, one never, one under two names; with checkpoints."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.shared = nn.Linear(6, 6)
        self.alias = self.shared
        self.never = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.alias(self.shared(x).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "plain":
            return self.last(self.block(self.block(x)))
        reentrant = self.kind == "reentrant"
        x = checkpoint(self.block, x, use_reentrant=reentrant)
        x = checkpoint(self.block, x, use_reentrant=reentrant)
        return checkpoint(self.last, x, use_reentrant=reentrant)


def static(rank: int, world_size: int, kind: str, view: bool) -> None:
    runs = []
    for wrapper in WRAPPERS:
        model = wrapper(
            Reuse(kind), static_graph=True, gradient_as_bucket_view=view, bucket_cap_mb=0.0001
        )
        seen: list[torch.Tensor | None] = []
        for step in range(3):
            x = torch.full((2, 6), float(rank + step + 1), requires_grad=True)
            if step == 1:
                with model.no_sync():
                    model(x).sum().backward()
            model(x).square().sum().backward()
            seen += gradients(model)
            model.zero_grad()
        runs.append(seen)
    assert_same(*runs)


@pytest.mark.parametrize("kind", ["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("view", [False, True])
def test_static_graph(kind: str, view: bool) -> None:
    run_ranks(static, 2, kind, view)


def changed_graph(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Branches(), static_graph=True)
    x = torch.ones(2, 4)
    for _ in range(2):
        model(x, [0, 1]).sum().backward()
    with pytest.raises(RuntimeError, match=r"graph has changed.* branches.2"):
        model(x, [0, 1, 2]).sum().backward()
    assert "graph has changed" in model._get_ddp_logging_data()["error"]
    model.zero_grad()
    model(x, [0, 1]).sum().backward()
    assert model.module.trunk.weight.grad is not None


def test_changed_graph_raises_and_the_next_step_works() -> None:
    run_ranks(changed_graph, 2)


# ------------------------------------------------------------------------- what forward returns

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: dict[str, Any]


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        a, b = self.a(x), self.b(x)
        match self.kind:
            case "dict":
                return {"a": a, "rest": [b, "text", None]}
            case "named tuple":
                return Pair(a, (b,))
            case _:
                return Output(a, {"b": b})


def total(output: Any) -> torch.Tensor:
    match output:
        case {"a": a, "rest": [b, *_]}:
            return (a + b).sum()
        case Pair(a, (b,)):
            return (a + b).sum()
        case _:
            return (output.logits + output.extra["b"]).sum()


def structured(rank: int, world_size: int, kind: str) -> None:
    model = DistributedDataParallel(Returns(kind), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        output = model(torch.full((1, 2), float(rank)))
        total(output).backward()
        assert torch.equal(model.module.a.weight.grad, torch.full((2, 2), 0.5))
        assert model.module.never.weight.grad is None
    if kind == "dataclass":
        assert isinstance(output, Output)


@pytest.mark.parametrize("kind", ["dict", "named tuple", "dataclass"])
def test_outputs_of_any_structure(kind: str) -> None:
    run_ranks(structured, 2, kind)
