"""Test local SGD against its definition, simulated in one process in float64."""

import math
import os
from typing import Any

import pytest
import torch
from support.lockstep import take_step
from support.simulated_ranks import simulate
from test_gossip import draw, loss_of, make_bucket, make_net, rows, train
from torch import Tensor, nn

import commhooks
from commhooks.algorithms.averaging.local_sgd import LocalSGD
from commhooks.comm.wire import all_reduce_bytes
from reducer import GradBucket


def simulate_training(size: int, steps: int, hook: LocalSGD) -> Tensor:
    nets = [make_net().double() for _ in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    count = len(list(nets[0].parameters()))
    for step in range(steps):
        for rank, net in enumerate(nets):
            net.zero_grad()
            loss_of(net, rank, step).backward()
        local = step - hook.start_step
        together = size if local < 0 else hook.ranks_per_node
        with torch.no_grad():
            for index in range(count):
                of_ranks = [list(net.parameters())[index] for net in nets]
                for first in range(0, size, together):
                    node = of_ranks[first : first + together]
                    mean = torch.stack([p.grad for p in node]).mean(0)
                    for parameter in node:
                        parameter.grad.copy_(mean)
                if local >= 0 and local % hook.period == 0:
                    average = torch.stack(of_ranks).mean(0)
                    for parameter in of_ranks:
                        parameter.copy_(average)
        for optimizer in optimizers:
            optimizer.step()
    return rows([list(net.parameters()) for net in nets]).detach()


HOOKS = {
    "every step": LocalSGD(period=1),
    "local": LocalSGD(period=3),
    "post-local": LocalSGD(period=2, start_step=3),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(("size", "stock"), [(1, False), (2, True), (3, False)])
def test_training_is_what_the_definition_says(
    run_ranks: Any, name: str, size: int, stock: bool
) -> None:
    results = run_ranks(train, size, HOOKS[name], range(9), stock)
    expected = simulate_training(size, 9, HOOKS[name])
    for (found, *_), of_rank in zip(results, expected, strict=True):
        torch.testing.assert_close(found, of_rank, rtol=1e-12, atol=1e-13)
    if size > 1:
        assert not torch.equal(results[0][0], results[1][0])
        assert results[0][3]["consensus_distance"] > 0


def test_nodes_average_gradients_in_between(run_ranks: Any) -> None:
    hook = LocalSGD(period=3, ranks_per_node=2)
    results = run_ranks(train, 4, hook, range(8), False)
    expected = simulate_training(4, 8, hook)
    for (found, *_), of_rank in zip(results, expected, strict=True):
        torch.testing.assert_close(found, of_rank, rtol=1e-12, atol=1e-13)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[2][0], results[3][0])
    assert not torch.equal(results[0][0], results[2][0])


def test_resumes_bitwise(run_ranks: Any) -> None:
    hook = HOOKS["post-local"]
    whole = run_ranks(train, 3, hook, range(9), False)
    half = run_ranks(train, 3, hook, range(5), False)
    resumed = run_ranks(train, 3, hook, range(5, 9), False, [saved for _, saved, *_ in half])
    for (found, *_), (expected, *_) in zip(resumed, whole, strict=True):
        assert torch.equal(found, expected)


# ------------------------------------------------------------------------- many ranks, one process


def step(hooks: list[Any], parameters: list[list[Tensor]], index: int) -> tuple[Tensor, list[int]]:
    dtype = parameters[0][0].dtype
    buckets = [
        make_bucket(draw(rank, index, dtype), of_rank, index)
        for rank, of_rank in enumerate(parameters)
    ]
    results, comms = simulate(hooks, buckets)
    for result, bucket in zip(results, buckets, strict=True):
        bucket.buffer().copy_(result)
    return rows([bucket.gradients() for bucket in buckets]), [comm.wire_bytes for comm in comms]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
def test_what_is_sent(size: int) -> None:
    hooks = [LocalSGD(period=4, start_step=2) for _ in range(size)]
    parameters = [draw(rank, 99, torch.bfloat16) for rank in range(size)]
    elements = 1 + 15 + 0 + 48
    found = [step(hooks, parameters, index)[1] for index in range(12)]
    expected = [2 * elements] * 2 + [4 * elements, 0, 0, 0] * 2 + [4 * elements, 0]
    rounded = [2 * (size - 1) * math.ceil(n / size) for n in expected]
    assert found == [[nbytes] * size for nbytes in rounded]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_rank_changes_no_bit(dtype: torch.dtype) -> None:
    parameters = [draw(0, 99, dtype)]
    for index in range(4):
        found, _ = step([LocalSGD(period=2)], parameters, index)
        assert torch.equal(found, rows([draw(0, index, dtype)]))
        assert torch.equal(rows(parameters), rows([draw(0, 99, dtype)]))


def test_an_average_that_is_not_finite_changes_nothing() -> None:
    hooks = [LocalSGD(period=1) for _ in range(3)]
    parameters = [draw(rank, 99) for rank in range(3)]
    parameters[1][1][2, 2] = torch.inf
    before = [t.clone() for of_rank in parameters for t in of_rank]
    found, _ = step(hooks, parameters, 0)
    assert found.isnan().all()
    assert all(map(torch.equal, before, [t for of_rank in parameters for t in of_rank]))


# ----------------------------------------------------------------------------------- registration


def test_bytes_are_not_known_before_the_launcher_has_been_asked() -> None:
    bucket = GradBucket(torch.zeros(10), [torch.zeros(10)], ["w"], step=0)
    assert LocalSGD(ranks_per_node=0).wire_bytes(bucket, 4) is None
    assert LocalSGD(ranks_per_node=0, start_step=1).wire_bytes(bucket, 4) == 2 * 3 * 10


def refuse(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(commhooks.CommHookError, match="found 3 ranks, 2 per node"):
        commhooks.register(model, "local_sgd", ranks_per_node=2)
    os.environ |= {"LOCAL_WORLD_SIZE": "1" if rank == 2 else "3", "LOCAL_RANK": str(rank % 3)}
    if rank == 2:
        os.environ["LOCAL_RANK"] = "0"
    try:
        with pytest.raises(commhooks.CommHookError, match=r"_per_node.: 3.*_per_node.: 1"):
            commhooks.register(model, "local_sgd", ranks_per_node=0)
        os.environ |= {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": str(rank)}
        handle = commhooks.register(model, "local_sgd", ranks_per_node=0)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"]
    assert handle.hook.to_config()["ranks_per_node"] == 3


def test_what_cannot_work_is_refused_at_registration(run_ranks: Any) -> None:
    run_ranks(refuse, 3)


def test_options_out_of_range() -> None:
    with pytest.raises(commhooks.CommHookError, match="period"):
        commhooks.create("local_sgd", period=0)


def test_stats_show_the_saving(run_ranks: Any) -> None:
    results = run_ranks(train, 2, LocalSGD(period=4), range(8), True)
    elements = sum(parameter.numel() for parameter in make_net().parameters())
    # One average, in step 4: buckets are rebuilt after step 0, and the count begins again.
    for _, _, wire_bytes, _ in results:
        assert wire_bytes == pytest.approx(all_reduce_bytes(8 * elements, 2) / 7)


@pytest.mark.parametrize("between", ["recover", "load"])
def test_a_step_that_is_repeated_is_measured_anew(between: str) -> None:
    """Also if a state is loaded back to that step."""
    hooks = [LocalSGD(period=1) for _ in range(2)]
    models = [{"a": torch.full((4,), float(rank))} for rank in range(2)]
    for _ in range(2):
        take_step(hooks, [{"a": model["a"].clone()} for model in models], 3)
        assert [hook.metrics()["consensus_distance"] for hook in hooks] == [1.0, 1.0]
        for hook in hooks:
            if between == "recover":
                hook.recover()
            else:
                hook.load_state_dict(hook.state_dict())
