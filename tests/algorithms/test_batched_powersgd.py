"""The whole bucket as one matrix."""

import pytest
import torch
from support.lockstep import lockstep, make_bucket
from torch import Tensor

from commhooks.algorithms.lowrank.batched_powersgd import BatchedPowerSGD

SHAPES: dict[str, tuple[int, ...]] = {
    "a": (11, 7),
    "b": (5,),
    "none": (0, 2),
    "c": (3, 4, 5),
    "s": (),
}


def batched(**options: object) -> BatchedPowerSGD:
    return BatchedPowerSGD(**{"rank": 2, "min_compression_rate": 1.0, "start_step": 0} | options)


def gradients_of(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in named.values()])


@pytest.mark.parametrize("two_sided", [True, False])
def test_sent_plus_error_is_gradient_plus_old_error(two_sided):
    hook = batched(two_sided=two_sided)
    old = torch.zeros(143, dtype=torch.float64)
    for step in range(5):
        gradient = flat(gradients_of(0, step))
        (result,), _ = lockstep([hook], [make_bucket(gradients_of(0, step), step)])
        error = torch.cat([hook.state[name]["error"] for name in SHAPES])
        torch.testing.assert_close(result + error, gradient + old)
        old = error.clone()
    assert (old != 0).any()


def test_two_small_collectives_for_the_whole_bucket():
    bucket = make_bucket(gradients_of(0, 0))
    (comm,) = lockstep([batched()], [bucket])[1]
    # 143 elements, most of them in rows of 7: 10 x 14, with 3 left over
    assert [sent.numel() for sent in comm.sent] == [2 * 10 + 3, 2 * 14]


def test_cost_formula():
    """143 numbers are a matrix of 10 rows and 14 columns, and 3: r·10 + 3 and r·14 travel."""
    bucket = make_bucket(gradients_of(0, 0))
    hook = batched()
    assert hook.wire_bytes(bucket, 2) == 8 * (2 * (10 + 14) + 3)
    (comm,) = lockstep([hook], [bucket])[1]
    assert [sent.numel() for sent in comm.sent] == [2 * 10 + 3, 2 * 14]
    assert batched(start_step=1).wire_bytes(bucket, 2) == 143 * 8


def test_ranks_agree_and_nothing_is_lost_in_the_mean():
    hooks = [batched() for _ in range(3)]
    given = got = torch.zeros(143, dtype=torch.float64)
    for step in range(4):
        gradients = [gradients_of(rank, step) for rank in range(3)]
        results, _ = lockstep(hooks, [make_bucket(named, step) for named in gradients])
        assert torch.equal(results[0], results[2])
        given = given + torch.stack([flat(named) for named in gradients]).mean(0)
        got = got + results[0]
    errors = [torch.cat([hook.state[name]["error"] for name in SHAPES]) for hook in hooks]
    torch.testing.assert_close(got + torch.stack(errors).mean(0), given)


def test_errors_stay_with_parameters_and_factors_with_the_bucket():
    hook = batched()
    whole = make_bucket(gradients_of(0, 0))
    lockstep([hook], [whole])
    assert set(hook.state) == {*SHAPES, whole.key}
    before = {name: hook.state[name]["error"].clone() for name in SHAPES}
    part = make_bucket({"c": torch.full((3, 4, 5), torch.nan, dtype=torch.float64)}, step=1)
    lockstep([hook], [part])
    for name, error in before.items():
        assert torch.equal(hook.state[name]["error"], error)
    assert part.key in hook.state
