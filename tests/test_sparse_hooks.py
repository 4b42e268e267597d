"""What holds for all sparse hooks: nothing is lost, all ranks agree, and bytes are as stated."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from lockstep import lockstep, make_bucket
from torch import Tensor

from commhooks import CommHook
from commhooks.algorithms.topk import TopK
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "matrix": (23, 17),
    "empty": (0, 5),
    "convolution": (9, 5, 3, 3),
    "bias": (23,),
}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# With what each of them needs to remember something.
HOOKS: dict[str, Callable[[], CommHook]] = {"topk": functools.partial(TopK, density=0.1)}


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    return draw_gradients(zeros, 7, rank, step)


def flat(named: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.cat([named[name].reshape(-1).to(dtype) for name in SHAPES])


def memory(hook: CommHook, field: str = "error") -> Tensor:
    """All of the hook's errors, (NUMEL,) float64; zeros before its first step."""
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return flat({name: hook.state.get(name, {}).get(field, zero[name]) for name in SHAPES})


def take_step(
    hooks: list[CommHook], step: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor]]:
    """The results of all ranks, and what each has contributed."""
    buckets = [make_bucket(gradients_of(rank, step, dtype), step) for rank in range(len(hooks))]
    results, comms = lockstep(hooks, buckets, wants_contribution=True)
    return results, [comm.contribution for comm in comms if comm.contribution is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", HOOKS)
def test_result_is_the_mean_of_the_contributions(name, size, dtype):
    hooks = [HOOKS[name]() for _ in range(size)]
    for step in range(4):
        results, contributions = take_step(hooks, step, dtype)
        assert all(torch.equal(result, results[0]) for result in results)
        assert results[0].count_nonzero() > 0
        mean = torch.stack(contributions).double().mean(0)
        # One rounding for each rank, and one of the result.
        unit = torch.finfo(dtype).eps * (1 if dtype.itemsize < 4 else size)
        torch.testing.assert_close(results[0].double(), mean, rtol=unit, atol=unit)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("name", HOOKS)
def test_numbers_that_are_not_finite_leave_no_trace(name, bad_rank, bad):
    hooks, twins = ([HOOKS[name]() for _ in range(3)] for _ in range(2))
    for both in (hooks, twins):
        take_step(both, 0)
    gradients = [gradients_of(rank, 1) for rank in range(3)]
    gradients[bad_rank]["bias"][11] = bad
    results, _ = lockstep(hooks, [make_bucket(named, 1) for named in gradients])
    assert all(result.isnan().all() for result in results)
    for hook, twin in zip(hooks, twins, strict=True):
        for parameter, entry in twin.state.items():
            for field, tensor in entry.items():
                assert torch.equal(hook.state[parameter][field], tensor), (parameter, field)
    for result, expected in zip(take_step(hooks, 2)[0], take_step(twins, 2)[0], strict=True):
        assert torch.equal(result, expected)


# ------------------------------------------------------------------------------ error feedback

WITH_ERROR = [functools.partial(TopK, density=0.1), functools.partial(TopK, density=0.6)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factory", WITH_ERROR, ids=repr)
def test_sent_and_error_are_gradient_and_old_error(factory, dtype):
    hooks = [factory() for _ in range(3)]
    for step in range(4):
        old = [memory(hook) for hook in hooks]
        _, contributions = take_step(hooks, step, dtype)
        for rank, hook in enumerate(hooks):
            # Gradient and old error are added in the memory's precision, once.
            memory_dtype = torch.promote_types(dtype, torch.float32)
            gradient = flat(gradients_of(rank, step, dtype), memory_dtype)
            total = (gradient + old[rank].to(memory_dtype)).double()
            assert torch.equal(contributions[rank].double() + memory(hook), total)


@pytest.mark.parametrize("factory", WITH_ERROR, ids=repr)
def test_what_float16_cannot_hold_remains_to_be_sent(factory):
    hook = factory()
    take_step([hook], 0, torch.float16)
    hook.state["matrix"]["error"][3, 4] = 200_000
    (result,), (contribution,) = take_step([hook], 1, torch.float16)
    assert result.max() == contribution.max() == 65504
    assert 134_000 < hook.state["matrix"]["error"][3, 4] < 135_000


# -------------------------------------------------------------------------------- on the wire


def message_bytes(numel: int, count: int, itemsize: int) -> int:
    """Independent of the hooks: values, then the shortest of all codes for the indices."""

    def words(bits: int) -> int:
        return 8 * ((bits + 63) // 64)

    shortest = words(numel)
    for low in range(31):
        shortest = min(shortest, words(((numel - 1) >> low) + count) + words(low * count))
    return count * itemsize + shortest


@pytest.mark.parametrize("density", [1e-6, 0.01, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_sends_as_many_bytes_as_stated(dtype, density):
    hook = TopK(density=density)
    _, (comm,) = lockstep([hook], [make_bucket(gradients_of(0, 0, dtype))])
    count = max(1, round(density * NUMEL))
    assert [tensor.nbytes for tensor in comm.sent] == [message_bytes(NUMEL, count, dtype.itemsize)]


def topk_bytes_on_the_engine(rank: int, size: int) -> list[tuple[int, int]]:
    """(found, expected) after each of two steps."""
    parameters = probe_parameters()
    numel = sum(tensor.numel() for tensor in parameters.values())
    trainer = Trainer(TopK(density=0.05), parameters, bucket_cap_mb=25, stable_buckets=True)
    found = []
    for step in range(2):
        trainer.step(draw_gradients(parameters, rank, step))
        expected = (size - 1) * message_bytes(numel, round(0.05 * numel), 4)
        found.append((trainer.handle.stats().total.wire_bytes, (step + 1) * expected))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_topk_bytes_are_counted_on_the_engine(run_ranks, size):
    for of_rank in run_ranks(topk_bytes_on_the_engine, size):
        for found, expected in of_rank:
            assert found == expected
