"""``hierarchical`` in the memory that the ranks of a node share: Note [Shards in host memory]."""

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import DistributedDataParallel
from commhooks.algorithms.averaging.hierarchical import Hierarchical
from commhooks.comm.host_memory import share_bytes
from commhooks.comm.wire import all_reduce_bytes
from commhooks.testing import run_ranks
from reducer import host_memory
from reducer.native import HostGroup

# Rows that 2 and 3 ranks do not divide, one row, none, and no dimension.
SHAPES: list[tuple[int, ...]] = [(7, 3), (1, 5), (40, 33), (0, 2), (), (2, 3, 4), (1025,)]


class Many(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        zeros = (torch.zeros(shape, dtype=dtype) for shape in SHAPES)
        self.parts = nn.ParameterList(map(nn.Parameter, zeros))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.parts, gradients, strict=True))  # type: ignore[return-value]


def gradients_of(rank: int, dtype: torch.dtype, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def averages(
    rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any], views: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the last step, and the same over Gloo."""
    models = [
        DistributedDataParallel(
            Many(dtype), bucket_cap_mb=0.004, gradient_as_bucket_view=views, host_memory=shared
        )
        for shared in (True, False)
    ]
    for model in models:
        commhooks.register(model, "hierarchical", **options)
    for step in range(4):  # buckets are rebuilt after the first
        for model in models:
            model.zero_grad(set_to_none=not views)
            model(gradients_of(rank, dtype, step)).backward()
    ours, gloos = ([p.grad.clone() for p in model.parameters()] for model in models)  # type: ignore[union-attr]
    return ours, gloos


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("inner", ["allreduce", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_two_ranks_per_node_get_the_bits_of_gloo(
    dtype: torch.dtype, inner: str, views: bool
) -> None:
    options = {"ranks_per_node": 2, "inner": inner}
    results = run_ranks(averages, 4, dtype, options, views)
    for ours, gloos in results:
        assert all(torch.equal(a, b) for a, b in zip(ours, gloos, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours, results[0][0], strict=True))


@pytest.mark.parametrize("ranks_per_node", [3, 6])
def test_more_ranks_per_node(ranks_per_node: int) -> None:
    options = {"ranks_per_node": ranks_per_node}
    for ours, gloos in run_ranks(averages, 6, torch.float32, options, False):
        for a, b in zip(ours, gloos, strict=True):
            torch.testing.assert_close(a, b)


class Elsewhere(commhooks.CommHook):
    """Returns the average in memory of its own."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        return await comm.all_reduce(bucket.buffer() / comm.size)


def average_elsewhere(rank: int, world_size: int) -> Tensor:
    model = DistributedDataParallel(nn.Linear(6, 4, bias=False))
    commhooks.register(model, Hierarchical(Elsewhere(), ranks_per_node=2))
    model(torch.full((6,), float(rank))).sum().backward()
    return model.module.weight.grad  # type: ignore[union-attr,return-value]


def test_an_inner_hook_may_return_other_memory() -> None:
    assert all((mean == 1.5).all() for mean in run_ranks(average_elsewhere, 4))


def on_hosts(rank: int, world_size: int, hosts: Sequence[str]) -> list[float | None]:
    """Let ranks take themselves for ranks of these hosts."""
    found = []
    with patch.object(host_memory, "_identity", lambda: (hosts[rank],)):
        model = DistributedDataParallel(nn.Linear(6, 4, bias=False))
    handle = commhooks.register(model, "hierarchical", ranks_per_node=2)
    for hook in ("hierarchical", "allreduce"):
        handle.replace(hook, **({"ranks_per_node": 2} if hook == "hierarchical" else {}))
        model.zero_grad()
        model(torch.full((6,), float(rank))).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((4, 6), 1.5))  # type: ignore[union-attr]
        found.append(handle.stats().metrics.get("in_host_memory"))
    return found


@pytest.mark.parametrize(
    ("hosts", "in_memory"),
    [
        ("aabb", [True, True, True, True]),
        ("abab", [False, False, False, False]),
        ("aaab", [True, True, False, False]),
        ("abcd", [False, False, False, False]),
    ],
)
def test_several_hosts(hosts: str, in_memory: list[bool]) -> None:
    """Nodes of one host use its memory. Plain averaging needs all ranks to be there."""
    assert run_ranks(on_hosts, 4, hosts) == [[each, None] for each in in_memory]


def use_again(rank: int, world_size: int) -> None:
    """With other ranks, whose memory is not where that of the former ones was."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    hook = Hierarchical(ranks_per_node=2)
    for group, expected in ((halves[rank // 2], rank // 2 * 2 + 0.5), (dist.group.WORLD, 1.5)):
        model = DistributedDataParallel(nn.Linear(6, 4, bias=False), process_group=group)
        handle = commhooks.register(model, hook)
        model(torch.full((6,), float(rank))).sum().backward()
        assert (model.module.weight.grad == expected).all(), (rank, model.module.weight.grad)  # type: ignore[union-attr]
        assert handle.stats().metrics["in_host_memory"] == 1
        handle.remove()
    model = DistributedDataParallel(nn.Linear(6, 4, bias=False), host_memory=False)
    handle = commhooks.register(model, hook)
    model(torch.ones(6)).sum().backward()
    assert handle.stats().metrics["in_host_memory"] == 0


def test_a_hook_may_be_registered_again() -> None:
    run_ranks(use_again, 4)


def mean_of_half(rank: int, world_size: int) -> Tensor:
    model = DistributedDataParallel(Many(torch.float16))
    commhooks.register(model, "hierarchical", ranks_per_node=2)
    large = [torch.full(shape, 60000.0, dtype=torch.float16) for shape in SHAPES]
    model(large).backward()
    return next(iter(model.parameters())).grad  # type: ignore[return-value]


def test_half_precision_is_summed_in_float32() -> None:
    assert all((mean == 60000).all() for mean in run_ranks(mean_of_half, 2))


def sent_bytes(rank: int, world_size: int) -> float | None:
    model = DistributedDataParallel(nn.Linear(6, 4, bias=False))
    handle = commhooks.register(model, "hierarchical", ranks_per_node=2)
    for _ in range(3):
        model(torch.ones(6)).sum().backward()
    return handle.stats().total.wire_bytes


def test_only_places_are_sent_inside_a_node() -> None:
    shard = 4 * 6 * 4 // 2
    expected = all_reduce_bytes(shard, 2) + 2 * share_bytes(2)
    assert run_ranks(sent_bytes, 4) == [expected] * 4


def one_is_not_finite(rank: int, world_size: int, bad: int) -> tuple[bool, bool]:
    model = DistributedDataParallel(Many(), stable_buckets=True)
    commhooks.register(model, "hierarchical", ranks_per_node=2, inner="int4")
    gradients = gradients_of(rank, torch.float32, 0)
    if rank == bad:
        gradients[2][-1] = torch.inf  # in the second shard
    model(gradients).backward()
    is_nan = all(p.grad.isnan().all() for p in model.parameters())  # type: ignore[union-attr]
    model.zero_grad()
    model(gradients_of(rank, torch.float32, 1)).backward()
    is_finite = all(p.grad.isfinite().all() for p in model.parameters())  # type: ignore[union-attr]
    return is_nan, is_finite


@pytest.mark.parametrize("bad", [0, 3])
def test_a_number_that_is_not_finite_reaches_all_shards_of_its_bucket(bad: int) -> None:
    assert run_ranks(one_is_not_finite, 4, bad) == [(True, True)] * 4


class Large(nn.Module):
    """Large enough that reading takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(200_000)) for _ in range(3))

    def forward(self, value: float) -> Tensor:
        return sum((p * value).sum() for p in self.parts)  # type: ignore[return-value]


def overwrite_at_once(rank: int, world_size: int, views: bool) -> None:
    """Rank 1 is late to read in every step."""
    model = DistributedDataParallel(Large(), bucket_cap_mb=0.5, gradient_as_bucket_view=views)
    commhooks.register(model, "hierarchical", ranks_per_node=2)
    mean_of = HostGroup.mean_of

    def late(*args: Any) -> None:
        time.sleep(0.01)
        mean_of(*args)

    if rank == 1:
        HostGroup.mean_of = staticmethod(late)  # type: ignore[method-assign]
    parameters = list(model.parameters())
    for step in range(10):
        for p in parameters:
            p.grad = None if p.grad is None or not views else p.grad.zero_()
        model(step + rank).backward()
        for p in parameters:
            assert torch.equal(p.grad, torch.full_like(p, step + (world_size - 1) / 2))  # type: ignore[arg-type]
            p.grad.fill_(torch.nan)  # type: ignore[union-attr]


@pytest.mark.parametrize("views", [False, True])
def test_gradients_may_be_overwritten_at_once(views: bool) -> None:
    run_ranks(overwrite_at_once, 4, views)


def ways(rank: int, world_size: int) -> list[str]:
    """In a process group of half of the ranks, with a change of hooks."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(Many(), process_group=halves[rank // 2])
    handle = commhooks.register(model, "noop")
    found = []
    for hook in ("int8", "hierarchical", "allreduce"):
        options = {"ranks_per_node": 2} if hook == "hierarchical" else {}
        handle.replace(hook, **options)
        model.zero_grad()
        model(gradients_of(rank, torch.float32, 0)).backward()
        stats = handle.stats()
        found.append((stats.transport, stats.metrics.get("in_host_memory")))
    return found


def test_statistics_name_the_way() -> None:
    expected = [("process group", None), ("process group", 1), ("host memory", None)]
    assert run_ranks(ways, 4) == [expected] * 4
