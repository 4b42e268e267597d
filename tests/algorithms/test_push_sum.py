"""Test push-sum against its definition, and the sums that it must keep."""

import functools
from typing import Any

import pytest
import torch
from support.mixing import can_be_built, mixing_matrix
from support.simulated_ranks import simulate
from test_gossip import draw, loss_of, make_bucket, make_net, rows, train
from torch import Tensor

import commhooks
from commhooks.algorithms.averaging.push_sum import PushSum
from commhooks.comm.topologies import round_at
from reducer import GradBucket

TOPOLOGIES = ["uniform", "ring", "exponential", "hypercube", "dissemination", "random"]
CASES = [
    (topology, size)
    for topology in TOPOLOGIES
    for size in (1, 2, 3, 4, 5, 7, 8, 16)
    if can_be_built(topology, size)
]


draw_once = functools.cache(draw)


def push(hooks: list[PushSum], parameters: list[list[Tensor]], step: int) -> list[int]:
    """Take one step; return the bytes that each rank has sent."""
    gradients = [draw_once(rank, step % 3) for rank in range(len(hooks))]
    buckets = [make_bucket(*both, step) for both in zip(gradients, parameters, strict=True)]
    results, comms = simulate(hooks, buckets)
    for result, bucket, drawn in zip(results, buckets, gradients, strict=True):
        assert result.data_ptr() == bucket.buffer().data_ptr()
        assert all(map(torch.equal, bucket.gradients(), drawn))
    return [comm.wire_bytes for comm in comms]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("topology", "size"), CASES)
def test_models_tend_to_the_mean_and_weights_keep_their_sum(topology: str, size: int) -> None:
    hooks = [PushSum(topology) for _ in range(size)]
    parameters = [draw(rank, 99) for rank in range(size)]
    mean = rows(parameters).mean(0)
    A, x = torch.eye(size).double(), rows(parameters)
    for step in range(120 if topology != "ring" else 4):
        sent = push(hooks, parameters, step)
        A = mixing_matrix(round_at(topology, size, step)) @ A
        weights = A.sum(1, keepdim=True)
        torch.testing.assert_close(rows(parameters), A @ x / weights)
        assert sent == [(mean.numel() + 4) * 8 if size > 1 else 0] * size
        if size > 1:
            found = torch.stack([hook.state["0"]["weight"] for hook in hooks])
            torch.testing.assert_close(found, weights[:, 0])
            assert found.sum() == pytest.approx(size)
    if topology == "uniform" and size > 3:
        assert found.max() > 1.2
    if topology != "ring":
        torch.testing.assert_close(rows(parameters), mean.expand(size, -1))
        assert all(hook.metrics().get("consensus_distance", 0) < 1e-6 for hook in hooks)


def test_consensus_distance_of_two_ranks_is_exact() -> None:
    hooks, parameters = [PushSum("ring") for _ in range(2)], [draw(rank, 99) for rank in range(2)]
    distances = (rows(parameters) - rows(parameters).mean(0)).norm(dim=1)
    push(hooks, parameters, 0)
    found = [hook.metrics()["consensus_distance"] for hook in hooks]
    assert found == pytest.approx(distances.tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_models_lose_nothing_on_the_way(dtype: torch.dtype) -> None:
    """Messages are float32, so the mean does not drift as that of rounded models would."""
    size = 5
    hooks = [PushSum("uniform") for _ in range(size)]
    parameters = [draw(rank, 99, dtype) for rank in range(size)]
    mean = rows(parameters).double().mean(0)
    for step in range(100):
        buckets = [
            make_bucket(draw(rank, step, dtype), of_rank, step)
            for rank, of_rank in enumerate(parameters)
        ]
        simulate(hooks, buckets)
    found = rows([[hook.state[n]["biased"] for n in hook.state] for hook in hooks]).double()
    torch.testing.assert_close(found.mean(0), mean, rtol=0, atol=200 * 2.0**-24 * size)
    assert {t.dtype for hook in hooks for t in hook.state["1"].values()} == {torch.float32}


def test_one_rank_changes_no_bit() -> None:
    parameters = [draw(0, 99)]
    hook = PushSum("uniform")
    push([hook], parameters, 0)
    assert torch.equal(rows(parameters), rows([draw(0, 99)]))
    assert hook.state == {}


def simulate_training(size: int, steps: int) -> list[Tensor]:
    """The definition in one process, each rank's x flat."""
    nets = [make_net().double() for _ in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    x = rows([list(net.parameters()) for net in nets]).detach()
    w = torch.ones(size, 1, dtype=torch.float64)
    for step in range(steps):
        for rank, net in enumerate(nets):
            net.zero_grad()
            loss_of(net, rank, step).backward()
        A = mixing_matrix(round_at("uniform", size, step))
        x, w = A @ x, A @ w
        z = x / w
        for net, values in zip(nets, z, strict=True):
            torch.nn.utils.vector_to_parameters(values.clone(), net.parameters())
        for optimizer in optimizers:
            optimizer.step()
        x = x + rows([list(net.parameters()) for net in nets]).detach() - z
    return list(rows([list(net.parameters()) for net in nets]).detach())


@pytest.mark.parametrize(("size", "stock"), [(1, False), (2, False), (3, True), (4, False)])
def test_training_is_what_the_definition_says(run_ranks: Any, size: int, stock: bool) -> None:
    results = run_ranks(train, size, PushSum("uniform"), range(8), stock)
    expected = simulate_training(size, 8)
    for (found, *_), of_rank in zip(results, expected, strict=True):
        torch.testing.assert_close(found, of_rank, rtol=1e-12, atol=1e-14)


def test_resumes_bitwise(run_ranks: Any) -> None:
    whole = run_ranks(train, 3, PushSum("uniform"), range(7), False)
    half = run_ranks(train, 3, PushSum("uniform"), range(3), False)
    resumed = run_ranks(
        train, 3, PushSum("uniform"), range(3, 7), False, [saved for _, saved, *_ in half]
    )
    for (found, *_), (expected, *_) in zip(resumed, whole, strict=True):
        assert torch.equal(found, expected)


def test_starts_again_after_a_failed_step() -> None:
    hooks = [PushSum("uniform") for _ in range(4)]
    parameters = [draw(rank, 99) for rank in range(4)]
    for step in range(5):
        push(hooks, parameters, step)
    for hook in hooks:
        hook.recover()
    mean = rows(parameters).mean(0)
    for step in range(5, 120):
        push(hooks, parameters, step)
    torch.testing.assert_close(rows(parameters), mean.expand(4, -1))


def test_a_state_in_float64_changes_no_message() -> None:
    """Messages of different sizes would end the processes of both ranks."""
    hook, parameters = PushSum(), draw(0, 99, torch.float32)
    bucket = make_bucket(draw(0, 0, torch.float32), parameters, 0)
    for name, parameter in zip(bucket.names, parameters, strict=True):
        weight = torch.ones((), dtype=torch.float64)
        hook.state[name] = {"biased": parameter.clone(), "weight": weight}
    assert hook._with_last_step(bucket).dtype == torch.float32


def test_weights_differ_where_a_bucket_was_left_out() -> None:
    """Buckets are rebuilt afterwards; no sum over ranks changes."""
    size = 5
    hooks = [PushSum("uniform") for _ in range(size)]
    parameters = [draw(rank, 99) for rank in range(size)]
    mean = rows(parameters).mean(0)

    def push_some(first: int, last: int, step: int) -> None:
        buckets = [
            GradBucket(
                torch.zeros(sum(p.numel() for p in of_rank[first:last]), dtype=torch.float64),
                of_rank[first:last],
                [str(i) for i in range(first, last)],
                step=step,
            )
            for of_rank in parameters
        ]
        simulate(hooks, buckets)

    for step in range(3):
        push_some(0, 2, step)
        if step != 1:
            push_some(2, 4, step)
    assert hooks[0].state["0"]["weight"] != hooks[0].state["3"]["weight"]
    for step in range(3, 120):
        push_some(1, 3, step)
        push_some(0, 1, step)
        push_some(3, 4, step)
    torch.testing.assert_close(rows(parameters), mean.expand(size, -1))


def join(rank: int, size: int) -> Tensor:
    net = make_net()
    model = commhooks.DistributedDataParallel(net)
    handle: Any = commhooks.register(model, "push_sum", topology="uniform")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * (rank + 1))
    with model.join():
        for _ in range((5, 8, 6)[rank]):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
    assert handle.hook.state == {}
    model(torch.ones(2, 6)).square().mean().backward()
    weights = torch.stack([entry["weight"] for entry in handle.hook.state.values()])
    return torch.cat([weights, *rows([list(net.parameters())]).detach()])


def test_starts_again_when_join_has_given_all_ranks_one_model(run_ranks: Any) -> None:
    found = torch.stack(run_ranks(join, 3))
    count = len(list(make_net().parameters()))
    assert not torch.equal(found[0, :count], found[1, :count])
    torch.testing.assert_close(found[:, count:], found[:1, count:].expand(3, -1))


def test_the_registry_knows_it() -> None:
    assert commhooks.create("push_sum", topology="ring") == PushSum("ring")
    with pytest.raises(commhooks.CommHookError, match="topology"):
        commhooks.create("push_sum", topology="star")
