"""The check that all numbers are finite, on its own and while packing."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.algorithms import Schedule
from commhooks.codecs.finite import all_finite
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("length", [1, 7, 1025])
def test_a_number_that_is_not_finite_is_found_anywhere(
    dtype: torch.dtype, number: float, length: int
) -> None:
    for position in {0, length // 2, length - 1}:
        tensor = torch.randn(length).to(dtype)
        assert all_finite(tensor)
        tensor[position] = number
        assert not all_finite(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_are_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    assert all_finite(torch.tensor([info.max, info.min, info.tiny, -0.0] * 50, dtype=dtype))
    assert all_finite(torch.empty(0, dtype=dtype))


@dataclass
class AsksAllFinite(commhooks.CommHook):
    """Record the answers, and whether packing computed them."""

    answers: list[bool] = field(default_factory=list, init=False)
    were_known: list[bool] = field(default_factory=list, init=False)

    checks_finite = True

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        answer = bucket.all_finite()
        buffer = bucket.buffer()
        assert answer.dtype == torch.bool
        assert answer.shape == ()
        assert bool(answer) == bool(buffer.isfinite().all())
        self.answers.append(bool(answer))
        self.were_known.append(bucket.all_finite().data_ptr() == answer.data_ptr())
        buffer[:1] = torch.nan
        assert not bucket.all_finite() or not buffer.numel()
        bucket.set_buffer(torch.zeros_like(buffer))
        assert bucket.all_finite()
        return buffer.nan_to_num_()


def ask(rank: int, size: int, dtype: torch.dtype, torch_ddp: bool) -> None:
    """Make one number of each gradient infinite in turn, with one parameter unused."""
    like = probe_parameters(dtype)
    inner = AsksAllFinite()
    options: Any = {} if torch_ddp else {"stable_buckets": True}
    hook = Schedule([(0, inner)])
    trainer = Trainer(hook, like, torch_ddp=torch_ddp, find_unused_parameters=True, **options)
    for unused in ("spare", "matrix"):
        for name in like:
            gradients = draw_gradients(like, rank)
            del gradients[unused]
            is_bad = name != unused and gradients[name].numel() > 0
            if is_bad:
                gradients[name][(-1,) * gradients[name].dim()] = torch.inf
            inner.answers.clear()
            trainer.step(gradients)
            assert inner.answers.count(False) == is_bad
    assert all(inner.were_known) == (not torch_ddp)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_computes_the_answer(run_ranks: Any, dtype: torch.dtype) -> None:
    run_ranks(ask, 1, dtype, False)


def test_on_torch_ddp_the_buffer_is_checked(run_ranks: Any) -> None:
    run_ranks(ask, 1, torch.float32, True)


def ask_of_other_strides(rank: int, size: int) -> None:
    warnings.filterwarnings("ignore", ".*gradient layout contract")
    hook = AsksAllFinite()
    trainer = Trainer(hook, {"matrix": torch.zeros(12, 10)})
    for number in (1.0, torch.nan):
        trainer.parameters["matrix"].grad = torch.full((10, 12), number).T
        trainer.model({"matrix": torch.ones(12, 10)}).backward()
    assert hook.answers == [True, False]
    assert all(hook.were_known)


def test_gradients_of_other_strides(run_ranks: Any) -> None:
    run_ranks(ask_of_other_strides, 1)


def ask_of_views(rank: int, size: int) -> None:
    hook = AsksAllFinite()
    gradients = {"one": torch.ones(5), "other": torch.ones(3)}
    trainer = Trainer(hook, gradients, gradient_as_bucket_view=True, stable_buckets=True)
    trainer.step(gradients)
    assert hook.were_known == [True]
    trainer.model(gradients | {"one": torch.full((5,), torch.inf)}).backward()
    assert hook.were_known == [True, False]
    assert hook.answers == [True, False]


def test_gradients_that_are_views_of_the_bucket_are_checked(run_ranks: Any) -> None:
    run_ranks(ask_of_views, 1)
