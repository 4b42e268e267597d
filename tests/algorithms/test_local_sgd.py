"""Test local SGD and DiLoCo against their definitions, simulated in one process in float64."""

import math
import os
from typing import Any

import pytest
import torch
from support.simulated_ranks import simulate
from test_gossip import draw, loss_of, make_bucket, make_net, rows, train
from torch import Tensor, nn

import commhooks
from commhooks.algorithms.averaging.local_sgd import LocalSGD, runs_of
from commhooks.comm.wire import all_reduce_bytes
from reducer import GradBucket

DILOCO = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


class OuterOptimizer:
    """The oracle: torch's SGD on one anchor; its gradient is the negative of the inner steps."""

    def __init__(self, hook: LocalSGD) -> None:
        self.hook = hook
        self.anchor: nn.Parameter | None = None

    def __call__(self, mean: Tensor) -> Tensor:
        if self.hook.outer == "none":
            return mean
        if self.anchor is None:
            self.anchor = nn.Parameter(mean.clone())
            self.sgd = torch.optim.SGD(
                [self.anchor],
                lr=self.hook.outer_lr,
                momentum=self.hook.outer_momentum,
                nesterov=self.hook.outer_momentum > 0,
            )
            return mean
        self.anchor.grad = self.anchor.detach() - mean
        self.sgd.step()
        return self.anchor.detach().clone()


def simulate_training(size: int, steps: int, hook: LocalSGD) -> Tensor:
    nets = [make_net().double() for _ in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    count = len(list(nets[0].parameters()))
    outer = [OuterOptimizer(hook) for _ in range(count)]
    fragment_of = runs_of([p.numel() for p in nets[0].parameters()], hook.fragments)
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
                turn = fragment_of[index] * hook.period // hook.fragments
                if local >= 0 and local % hook.period == turn:
                    value = outer[index](torch.stack(of_ranks).mean(0))
                    for parameter in of_ranks:
                        parameter.copy_(value)
        for optimizer in optimizers:
            optimizer.step()
    return rows([list(net.parameters()) for net in nets]).detach()


HOOKS = {
    "every step": LocalSGD(period=1),
    "local": LocalSGD(period=3),
    "post-local": LocalSGD(period=2, start_step=3),
    "outer without effect": LocalSGD(period=2, outer="nesterov", outer_lr=1.0, outer_momentum=0.0),
    "DiLoCo": LocalSGD(period=2, start_step=1, **DILOCO),
    "streaming": LocalSGD(period=3, fragments=3, **DILOCO),
    "more fragments than steps": LocalSGD(period=2, fragments=4),
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


@pytest.mark.parametrize("options", [{}, DILOCO])
def test_nodes_average_gradients_in_between(run_ranks: Any, options: Any) -> None:
    hook = LocalSGD(period=3, ranks_per_node=2, **options)
    results = run_ranks(train, 4, hook, range(8), False)
    expected = simulate_training(4, 8, hook)
    for (found, *_), of_rank in zip(results, expected, strict=True):
        torch.testing.assert_close(found, of_rank, rtol=1e-12, atol=1e-13)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[2][0], results[3][0])
    assert not torch.equal(results[0][0], results[2][0])


def test_outer_none_is_what_no_momentum_and_lr_of_one_do() -> None:
    plain = simulate_training(3, 7, HOOKS["local"])
    outer = LocalSGD(period=3, outer="nesterov", outer_lr=1.0, outer_momentum=0.0)
    torch.testing.assert_close(simulate_training(3, 7, outer), plain)


@pytest.mark.parametrize("name", ["post-local", "DiLoCo", "streaming"])
def test_resumes_bitwise(run_ranks: Any, name: str) -> None:
    hook = HOOKS[name]
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
    hook_options = {"period": 4, "start_step": 2, "fragments": 2}
    hooks = [LocalSGD(**hook_options) for _ in range(size)]
    parameters = [draw(rank, 99, torch.bfloat16) for rank in range(size)]
    elements = [1, 15, 0, 48]
    for hook in hooks:
        hook._fragment_of = {"0": 0, "1": 0, "2": 0, "3": 1}
    found = [step(hooks, parameters, index)[1] for index in range(12)]
    in_float32 = [4 * (1 + 15 + 0), 0, 4 * 48, 0]
    expected = [2 * sum(elements)] * 2 + in_float32 * 2 + in_float32[:2]
    rounded = [2 * (size - 1) * math.ceil(n / size) for n in expected]
    assert found == [[nbytes] * size for nbytes in rounded]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_rank_without_outer_optimizer_changes_no_bit(dtype: torch.dtype) -> None:
    parameters = [draw(0, 99, dtype)]
    for index in range(4):
        found, _ = step([LocalSGD(period=2)], parameters, index)
        assert torch.equal(found, rows([draw(0, index, dtype)]))
        assert torch.equal(rows(parameters), rows([draw(0, 99, dtype)]))


def test_an_average_that_is_not_finite_changes_nothing() -> None:
    hooks = [LocalSGD(period=1, **DILOCO) for _ in range(3)]
    parameters = [draw(rank, 99) for rank in range(3)]
    for index in range(2):
        step(hooks, parameters, index)
    parameters[1][1][2, 2] = torch.inf
    before = [t.clone() for of_rank in parameters for t in of_rank]
    states = [hook.state_dict() for hook in hooks]
    found, _ = step(hooks, parameters, 2)
    assert found.isnan().all()
    assert all(map(torch.equal, before, [t for of_rank in parameters for t in of_rank]))
    for hook, state in zip(hooks, states, strict=True):
        for name, entry in state.items():
            assert all(torch.equal(hook.state[name][field], entry[field]) for field in entry)


def test_the_outer_optimizer_is_kept_in_float32_for_half_precision_models() -> None:
    hooks = [LocalSGD(period=1, **DILOCO) for _ in range(2)]
    parameters = [draw(rank, 99, torch.bfloat16) for rank in range(2)]
    for index in range(3):
        step(hooks, parameters, index)
        assert torch.equal(rows(parameters)[0], rows(parameters)[1])
    assert {t.dtype for e in hooks[0].state.values() for t in e.values()} == {torch.float32}
    hooks[0].recover()
    assert hooks[0].state == {}


# ----------------------------------------------------------------------------------- registration


def test_fragments_are_runs_of_about_equal_size() -> None:
    assert runs_of([10] * 6, 3) == [0, 0, 1, 1, 2, 2]
    assert runs_of([1, 1, 1, 97], 2) == [0, 0, 0, 1]
    assert runs_of([5, 0, 0], 2) == [1, 1, 1]
    assert runs_of([0, 0], 2) == [0, 0]
    assert runs_of([3, 4, 5], 1) == [0, 0, 0]


def test_bytes_are_not_known_before_the_launcher_has_been_asked() -> None:
    bucket = GradBucket(torch.zeros(10), [torch.zeros(10)], ["w"], step=0)
    assert LocalSGD(ranks_per_node=0).wire_bytes(bucket, 4) is None
    assert LocalSGD(ranks_per_node=0, start_step=1).wire_bytes(bucket, 4) == 2 * 3 * 10


def refuse(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(commhooks.CommHookError, match=r"as parameters, 2, found fragments=3"):
        commhooks.register(model, "local_sgd", fragments=3)
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


@pytest.mark.parametrize(
    "options",
    [
        {"period": 0},
        {"outer": "adam"},
        {"outer_lr": 0.0},
        {"outer_momentum": 1.0},
        {"fragments": 0},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(commhooks.CommHookError, match=next(iter(options))):
        commhooks.create("local_sgd", **options)


def test_stats_show_the_saving(run_ranks: Any) -> None:
    results = run_ranks(train, 2, LocalSGD(period=4), range(8), True)
    elements = sum(parameter.numel() for parameter in make_net().parameters())
    # One average, in step 4: buckets are rebuilt after step 0, and the count begins again.
    for _, _, wire_bytes, _ in results:
        assert wire_bytes == pytest.approx(all_reduce_bytes(8 * elements, 2) / 7)
