"""Half precision in Python: inside other hooks, and on torch's wrapper."""

import math
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.algorithms import exact
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters
from reducer import GradBucket


@patch.object(exact, "_LARGE", 1)
def keep_memory(rank: int, size: int, name: str) -> None:
    python: Any = commhooks.create(name)
    ours, torchs = Trainer(commhooks.create(name)), Trainer(python, torch_ddp=True)
    places: list[set[int]] = []
    for step in range(6):
        gradients = draw_gradients(probe_parameters(), rank, step)
        expected, found = ours.step(gradients), torchs.step(gradients)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        places.append({memory.data_ptr() for _, memory in python._large._values.values()})
        if step == 3:
            before = [memory for _, memory in python._large._values.values()]  # as a message does
            python.recover()
            assert not python._large._values
    assert before
    assert places[2] == places[3] != set()
    assert places[4] == places[5]
    assert places[4].isdisjoint(places[3])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_large_buckets_send_from_the_same_memory_in_each_step(run_ranks: Any, name: str) -> None:
    """But not after a failure, when messages of the failed step may still be on their way."""
    run_ranks(keep_memory, 2, name)


@patch.object(exact, "_LARGE", 1)
def test_memory_of_another_shape_is_not_sent() -> None:
    """Names identify a bucket, and a parameter may change its shape."""
    hook: Any = commhooks.create("bf16")
    for shape in ((2, 3), (2, 2), (2, 2)):
        bucket = GradBucket(torch.zeros(math.prod(shape)), [torch.zeros(shape)], ["w"])
        memory = hook._memory(bucket)
        assert memory.shape == (math.prod(shape),)
    assert hook._memory(bucket) is memory


def sum_in_float32(rank: int, size: int, name: str) -> None:
    hook: Any = commhooks.create(name, two_shot=True)
    trainer = Trainer(hook, host_memory=False)  # where an all-reduce would sum in half precision
    for step in range(2):
        of_all = [draw_gradients(probe_parameters(), each, step) for each in range(size)]
        found = trainer.step(of_all[rank])
        for key, result in found.items():
            sent = [(gradients[key] / size).to(hook.wire_dtype) for gradients in of_all]
            total = torch.stack(sent).sum(0, dtype=torch.float32).to(hook.wire_dtype)
            assert torch.equal(result, total.to(result.dtype)), (step, key)
            if size == 2:
                assert torch.equal(total, sent[0] + sent[1])  # as an all-reduce adds


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_two_shots_round_twice(run_ranks: Any, name: str, size: int) -> None:
    run_ranks(sum_in_float32, size, name)


def averages_of_one_gradient(rank: int, size: int, stochastic: bool) -> dict[str, Tensor]:
    """Return the mean error of the averages of one gradient over many steps, in its last digits."""
    trainer = Trainer(commhooks.create("bf16", two_shot=True, stochastic=stochastic))
    of_all = [draw_gradients(probe_parameters(), each) for each in range(size)]
    steps = 200
    results = [trainer.step(of_all[rank]) for _ in range(steps)]
    found = {}
    for key, first in results[0].items():
        exact = torch.stack([gradients[key].double() for gradients in of_all]).mean(0)
        mean = torch.stack([result[key].double() for result in results]).mean(0)
        assert not stochastic or first.numel() < 50 or not torch.equal(first, results[1][key])
        found[key] = mean - exact
        found[f"{key} now"] = results[-1][key]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_stochastic_rounding_is_right_on_average(run_ranks: Any, size: int) -> None:
    nearest, unbiased = (
        run_ranks(averages_of_one_gradient, size, stochastic) for stochastic in (False, True)
    )
    for of_ranks in (nearest, unbiased):
        assert all(same_bits(found, of_ranks[0]) for found in of_ranks)
    errors = {
        name: torch.cat([error.flatten() for key, error in found[0].items() if " " not in key])
        for name, found in (("nearest", nearest), ("unbiased", unbiased))
    }
    # 200 steps divide a random error by 14; one to nearest is the same in each step.
    assert errors["unbiased"].norm() < errors["nearest"].norm() / 4


def scale_before_the_cast(rank: int, size: int) -> None:
    net = torch.nn.Linear(5, 3, bias=False)
    model = commhooks.DistributedDataParallel(net, hook="fp16", gradient_as_bucket_view=False)
    # A gradient whose memory has another order than its parameter's is not copied by our kernels.
    net.weight.grad = torch.zeros(5, 3).T
    largest = 1.2e5 if rank == 0 else 0.0  # more than float16 can hold, also if it is rounded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the memory order
        (model(torch.ones(1, 5)) * largest).sum().backward()
    assert net.weight.grad.stride() == (1, 3)
    torch.testing.assert_close(net.weight.grad, torch.full((3, 5), 6e4), rtol=1e-3, atol=0)


def test_gradients_are_divided_before_they_are_cast_in_any_memory_order(run_ranks: Any) -> None:
    run_ranks(scale_before_the_cast, 2)
