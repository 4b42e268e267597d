"""Cast: a hook in another precision."""

from typing import Any

import pytest
import torch
from support.inner_hooks import Recorder

import commhooks
from commhooks.algorithms import Cast
from commhooks.hook.derived_bucket import bucket_with
from commhooks.testing.compare import same_bits, tensor_layout
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters
from reducer import GradBucket


def test_a_cast_bucket_keeps_layouts() -> None:
    parameters = probe_parameters()
    flat = torch.arange(float(sum(tensor.numel() for tensor in parameters.values())))
    bucket = GradBucket(flat, list(parameters.values()), list(parameters), index=1, step=7)
    cast = bucket_with(bucket, flat.double())
    assert (cast.key, cast.index(), cast.is_last(), cast.step) == (bucket.key, 1, True, 7)
    for found, expected in zip(cast.gradients(), bucket.gradients(), strict=True):
        assert tensor_layout(found)[1:] == tensor_layout(expected)[1:]
        assert torch.equal(found, expected.double())
    assert not bucket_with(
        GradBucket(flat, list(parameters.values()), list(parameters), is_last=False), flat
    ).is_last()


def narrow(rank: int, size: int, dtype: torch.dtype, stock: bool) -> None:
    parameters = probe_parameters(dtype)
    inner = Recorder()
    trainer = Trainer(Cast(inner, torch.bfloat16), parameters, torch_ddp=stock)
    reference = Trainer(commhooks.create("bf16"), parameters, torch_ddp=stock)
    for step in range(3):
        gradients = draw_gradients(parameters, rank, step)
        # Halving is exact, so the order of roundings does not matter.
        assert same_bits(trainer.step(gradients), reference.step(gradients))
    assert {call.dtype for call in inner.calls} == {torch.bfloat16}
    elements = sum(tensor.numel() for tensor in parameters.values())
    sent = trainer.handle.stats().total.wire_bytes
    assert sent is not None
    buckets = len(trainer.handle.stats().buckets)
    assert 2 * elements <= sent <= 2 * elements + buckets  # odd sizes are rounded up


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_the_half_precision_average(run_ranks: Any, dtype: torch.dtype, stock: bool) -> None:
    run_ranks(narrow, 2, dtype, stock)


def widen(rank: int, size: int) -> None:
    parameters = probe_parameters(torch.float16)
    hook = commhooks.create(
        "cast",
        inner={"name": "powersgd", "rank": 4, "start_step": 0, "min_compression_rate": 1},
        dtype="float64",
    )
    Trainer(hook, parameters).step(draw_gradients(parameters, rank, 0))
    assert hook.nested()["inner"].state["matrix"]["error"].dtype == torch.float64


def test_memory_follows_the_dtype(run_ranks: Any) -> None:
    run_ranks(widen, 2)


def overflow(rank: int, size: int) -> None:
    parameters = probe_parameters()
    gradients = draw_gradients(parameters, rank, 0)
    if rank == 0:
        gradients["matrix"][1, 2] = 3e5
    found = Trainer(commhooks.create("cast", inner="allreduce", dtype="float16"), parameters).step(
        gradients
    )
    assert found["matrix"][1, 2] == torch.inf


def test_out_of_range_is_infinite_on_all_ranks(run_ranks: Any) -> None:
    run_ranks(overflow, 2)


@pytest.mark.parametrize("dtype", ["int32", "bool", "float8_e4m3fn", "complex64"])
def test_dtypes_that_cannot_be_added_are_refused(dtype: str) -> None:
    with pytest.raises(commhooks.CommHookOptionError, match=rf"'dtype'.*found torch\.{dtype}"):
        commhooks.create("cast", inner="allreduce", dtype=dtype)
