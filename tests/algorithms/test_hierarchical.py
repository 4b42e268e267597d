"""Test that nodes average exactly, and that the inner hook sees nodes instead of ranks."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.simulated_ranks import Group, simulate
from test_gossip import draw, make_bucket, rows, train
from torch import Tensor, nn

import commhooks
from commhooks.algorithms.averaging.hierarchical import Hierarchical
from commhooks.comm.wire import all_reduce_bytes


def reduce(
    inner: Any, ranks_per_node: int, size: int, *, sharded: bool = True, step: int = 0
) -> tuple[Tensor, list[int]]:
    options = {"sharded": sharded} if inner is None else {"sharded": sharded, "inner": inner}
    hook = commhooks.create("hierarchical", ranks_per_node=ranks_per_node, **options)
    hooks = [hook] * size
    buckets = [make_bucket(draw(rank, step), draw(0, 99), step) for rank in range(size)]
    results, comms = simulate(hooks, buckets)
    return torch.stack(results), [comm.wire_bytes for comm in comms]


CASES = [(size, n) for size in (1, 2, 3, 4, 6, 8, 16) for n in (1, 2, 3, 4, 8) if size % n == 0]


def largest_shard(ranks_per_node: int) -> int:
    """Return the bytes of a shard of the parameters that :func:`draw` returns, in float64."""
    rows = [(1, 1), (5, 3), (4, 12)]
    return 8 * sum(-(-count // ranks_per_node) * length for count, length in rows)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("size", "ranks_per_node"), CASES)
def test_the_average_and_its_cost(size: int, ranks_per_node: int, sharded: bool) -> None:
    """Without ``inner`` the average is exact."""
    found, sent = reduce(None, ranks_per_node, size, sharded=sharded)
    expected = torch.stack(
        [make_bucket(draw(rank, 0), draw(0, 99), 0).buffer() for rank in range(size)]
    ).mean(0)
    torch.testing.assert_close(found, expected.expand(size, -1))
    assert (found == found[0]).all()
    n = expected.nbytes
    if sharded and ranks_per_node > 1:
        part = largest_shard(ranks_per_node)
        inside = 2 * (ranks_per_node - 1) * part
        assert sent == [inside + all_reduce_bytes(part, size // ranks_per_node)] * size
        return
    inside = all_reduce_bytes(n, ranks_per_node)
    leader = all_reduce_bytes(n, size // ranks_per_node) + (n if ranks_per_node > 1 else 0)
    for rank, nbytes in enumerate(sent):
        assert nbytes == inside + (leader if rank % ranks_per_node == 0 else 0)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("size", "ranks_per_node"), CASES)
def test_cost_formula(size: int, ranks_per_node: int, sharded: bool) -> None:
    """The bytes of each rank; of the first rank of a node if the hook is not registered."""
    _, sent = reduce("bf16", ranks_per_node, size, sharded=sharded)
    bucket = make_bucket(draw(0, 0), draw(0, 99), 0)
    for rank, nbytes in enumerate(sent):
        hook = Hierarchical("bf16", ranks_per_node=ranks_per_node, sharded=sharded)
        hook.prepare({}, Group(rank, size))
        assert hook.wire_bytes(bucket, size) == nbytes
    unregistered = Hierarchical("bf16", ranks_per_node=ranks_per_node, sharded=sharded)
    assert unregistered.wire_bytes(bucket, size) == sent[0]


def test_no_cost_where_it_is_not_known() -> None:
    bucket = make_bucket(draw(0, 0), draw(0, 99), 0)
    assert Hierarchical("bf16").wire_bytes(bucket, 4) is None  # ranks per node: not asked yet
    assert Hierarchical("threshold", ranks_per_node=2).wire_bytes(bucket, 4) is None


@pytest.mark.parametrize("sharded", [True, False])
def test_a_lossy_hook_sees_one_gradient_per_node(sharded: bool) -> None:
    """Gossip in a ring of three nodes: each node has its mean and that of the one before."""
    gossip = {"name": "gossip", "what": "gradients", "topology": "ring"}
    found, _ = reduce(gossip, 2, 6, sharded=sharded)
    gradients = torch.stack(
        [make_bucket(draw(rank, 0), draw(0, 99), 0).buffer() for rank in range(6)]
    )
    of_nodes = gradients.view(3, 2, -1).mean(1)
    expected = (of_nodes + of_nodes.roll(1, 0)) / 2
    torch.testing.assert_close(found, expected.repeat_interleave(2, 0))


@pytest.mark.parametrize("sharded", [True, False])
def test_overlaps_with_any_number_of_collectives_between_nodes(
    run_ranks: Any, sharded: bool
) -> None:
    """Two dependent collectives of PowerSGD between nodes, and none on ranks that do not lead."""
    inner = {"name": "powersgd", "rank": 8, "min_compression_rate": 0.0, "start_step": 2}
    hook = Hierarchical(inner, ranks_per_node=2, sharded=sharded)  # rank 8: without loss
    plain = run_ranks(train, 4, "allreduce", range(6), False)
    for stock in (False, True):
        results = run_ranks(train, 4, hook, range(6), stock)
        for (found, *_), (expected, *_) in zip(results, plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
            assert torch.equal(found, results[0][0])
        states = [any(saved[2]["tensors"].values()) for _, saved, *_ in results]
        assert states == [True, sharded, True, sharded]


@pytest.mark.parametrize("sharded", [True, False])
def test_resumes_bitwise(run_ranks: Any, sharded: bool) -> None:
    inner = {"name": "powersgd", "rank": 1, "min_compression_rate": 0.0, "start_step": 0}
    hook = Hierarchical(inner, ranks_per_node=2, sharded=sharded)
    whole = run_ranks(train, 4, hook, range(6), False)
    half = run_ranks(train, 4, hook, range(3), False)
    resumed = run_ranks(train, 4, hook, range(3, 6), False, [saved for _, saved, *_ in half])
    for (found, *_), (expected, *_) in zip(resumed, whole, strict=True):
        assert torch.equal(found, expected)


# ------------------------------------------------------------------------------ refused inner hooks


@pytest.mark.parametrize(
    "inner",
    [
        {"name": "local_sgd"},
        {"name": "push_sum"},
        {"name": "gossip", "what": "parameters"},
        {"name": "gossip", "what": "gradients", "average_every": 5},
        {"name": "cast", "inner": {"name": "local_sgd"}},
    ],
)
def test_hooks_that_change_parameters_are_refused(inner: Any) -> None:
    with pytest.raises(commhooks.CommHookOptionError, match=r"'inner'.*changes param.*local_sgd"):
        commhooks.create("hierarchical", inner=inner)


@pytest.mark.parametrize(
    "inner",
    [
        {"name": "skip_nonfinite", "inner": "bf16"},
        {
            "name": "schedule",
            "stages": [[0, "bf16"], [5, {"name": "skip_nonfinite", "inner": "bf16"}]],
        },
    ],
)
def test_hooks_that_skip_steps_are_refused(inner: Any) -> None:
    with pytest.raises(commhooks.CommHookOptionError, match=r"skips.*Put skip_nonfinite around"):
        commhooks.create("hierarchical", inner=inner)


def skip_around(rank: int, size: int) -> Tensor:
    """Run the training loop of the docs; a gradient on a rank that does not lead is not finite."""
    inner = Hierarchical(commhooks.create("bf16"), ranks_per_node=2)
    net = nn.Linear(3, 1)
    model = commhooks.DistributedDataParallel(net)
    handle = commhooks.register(model, "skip_nonfinite", inner=inner)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        inputs = draw(rank, step)[1].float()
        if (rank, step) == (3, 2):
            inputs[0, 0] = torch.inf
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        was_skipped = handle.hook.last_step_was_skipped  # type: ignore[union-attr]
        assert was_skipped == (step == 2)
        if not was_skipped:
            optimizer.step()
    return rows([list(net.parameters())])


def test_all_ranks_know_of_drops_around_it(run_ranks: Any) -> None:
    models = run_ranks(skip_around, 4)
    assert all(torch.equal(model, models[0]) for model in models)


def refuse(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(commhooks.CommHookError, match="found 3 ranks, 2 per node"):
        commhooks.register(model, "hierarchical", inner="bf16", ranks_per_node=2)
    with pytest.raises(commhooks.CommHookError, match="LOCAL_WORLD_SIZE"):
        commhooks.register(model, "hierarchical", inner="bf16")
    hypercube = {"name": "gossip", "what": "gradients", "topology": "hypercube"}
    with pytest.raises(commhooks.CommHookError, match=r"hypercube.*found 3 ranks"):
        commhooks.register(model, "hierarchical", inner=hypercube, ranks_per_node=1)
    for inner in ("auto", {"name": "route", "rules": [["weight", "int8"]], "default": "auto"}):
        with pytest.raises(commhooks.CommHookError, match=r"'auto'.* be inside hierarchical"):
            commhooks.register(model, "hierarchical", inner=inner, ranks_per_node=1)
    # Three ranks are no hypercube, but one node is.
    commhooks.register(model, "hierarchical", inner=hypercube, ranks_per_node=3)


def test_what_cannot_work_is_refused_at_registration(run_ranks: Any) -> None:
    run_ranks(refuse, 3)


@dataclass
class Sensitive(commhooks.CommHook):
    """Raises on one rank in one step."""

    broken: bool = field(default=False, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        total = await comm.all_reduce(bucket.buffer().div_(comm.size))
        if self.broken:
            raise ValueError("broken")
        return total


def fail_once(rank: int, size: int, sharded: bool) -> tuple[list[str], Tensor]:
    model = commhooks.DistributedDataParallel(nn.Linear(64, 64), bucket_cap_mb=0.001)
    inner = Sensitive()
    commhooks.register(model, Hierarchical(inner, ranks_per_node=2, sharded=sharded))
    errors = []
    for step in range(4):
        inner.broken = step in (0, 2) and rank == 2
        model.zero_grad()
        try:
            model(torch.full((1, 64), float(rank))).sum().backward()
        except commhooks.CommHookError as error:
            errors.append(f"{step} {error}")
    return errors, rows([[p.grad for p in model.parameters()]])


@pytest.mark.parametrize("sharded", [True, False])
def test_a_rank_that_fails_ends_the_step_on_all_ranks(run_ranks: Any, sharded: bool) -> None:
    """Rank 1 shares no subgroup with the failing rank 2."""
    results = run_ranks(fail_once, 4, sharded)
    for errors, gradients in results:
        assert [text[:2] for text in errors] == ["0 ", "2 "]
        assert all("ValueError: broken" in text for text in errors)
        assert torch.equal(gradients, results[0][1])
        assert gradients[0, 0] == 1.5
