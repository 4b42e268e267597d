"""The state of PowerSGD: numbers that are not finite, other buckets, saved states, other ranks."""

import io

import pytest
import torch
from support.lockstep import lockstep, make_bucket, take_step
from support.powersgd_steps import (
    SHAPES,
    assert_same_state,
    by_name,
    gradients_of,
    powersgd,
    tensors_of,
)
from torch import Tensor

from commhooks.algorithms.lowrank.powersgd import PowerSGD
from commhooks.errors import CommHookStateError

# ------------------------------------------------------------- zeros, and numbers not finite


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("warm_steps", [0, 3])
def test_zero_gradients_give_zeros_and_do_no_harm(two_sided, warm_steps):
    hooks = [powersgd(two_sided=two_sided, error_feedback=False) for _ in range(2)]
    for step in range(warm_steps):
        take_step(hooks, [gradients_of(rank, step) for rank in range(2)], step)
    before = hooks[0].state_dict() if warm_steps else None
    for step in range(warm_steps, warm_steps + 4):
        zeros = [{k: g.zero_() for k, g in gradients_of(0, 0).items()} for _ in hooks]
        for result in take_step(hooks, zeros, step):
            assert torch.equal(result, torch.zeros_like(result))
    for *_, tensor in tensors_of(hooks[0].state):
        assert tensor.isfinite().all()
        assert (tensor != 0).any()
    if before is not None:
        assert_same_state(hooks[0], before)
    (result, _) = take_step(hooks, [gradients_of(0, 9)] * 2, warm_steps + 4)
    assert result.isfinite().all()
    assert (by_name(result)["first"] != 0).any()


@pytest.mark.parametrize("two_sided", [True, False])
def test_gradients_of_lower_rank_than_r(two_sided):
    """Factors with vectors of zeros: rank recovers as soon as the gradient has it again."""
    hook = powersgd(rank=4, two_sided=two_sided, error_feedback=False)
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(s, generator=generator).double() for s in ((23, 4), (4, 17)))
    for step in range(6):
        result = take_step([hook], [{"first": torch.outer(left[:, 0], right[0])}], step)[0]
        assert result.isfinite().all()
    for step in range(6, 12):
        result = take_step([hook], [{"first": left @ right}], step)[0]
    torch.testing.assert_close(result.view(23, 17), left @ right)


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (torch.inf, "first"),
        (torch.nan, "third"),
        (-torch.inf, "convolution"),
        (torch.nan, "scalar"),
    ],
)
@pytest.mark.parametrize("step_of_bad", [0, 3])
def test_non_finite_gradient_leaves_every_state_as_it_was(two_sided, bad, where, step_of_bad):
    hooks = [powersgd(two_sided=two_sided) for _ in range(3)]
    twins = [powersgd(two_sided=two_sided) for _ in range(3)]
    for step in range(step_of_bad):
        gradients = [gradients_of(rank, step) for rank in range(3)]
        for twin in (hooks, twins):
            take_step(twin, gradients, step)
    states = [hook.state_dict() for hook in hooks]
    gradients = [gradients_of(rank, 50) for rank in range(3)]
    gradients[1][where].view(-1)[-1] = bad
    for result in take_step(hooks, gradients, step_of_bad):
        assert not by_name(result)[where].isfinite().any()
    if step_of_bad:
        for hook, state in zip(hooks, states, strict=True):
            assert_same_state(hook, state)
    gradients = [gradients_of(rank, 51) for rank in range(3)]
    for result, twin in zip(
        take_step(hooks, gradients, step_of_bad + 1),
        take_step(twins, gradients, step_of_bad + 1),
        strict=True,
    ):
        assert torch.equal(result, twin)
        assert result.isfinite().all()


@pytest.mark.parametrize("two_sided", [True, False])
def test_non_finite_number_that_the_factor_does_not_look_at(two_sided):
    """inf times a zero of the factor is NaN, so no zero hides it."""
    hooks = [powersgd(two_sided=two_sided, rank=1) for _ in range(2)]
    one_hot = torch.eye(8)[0]
    factors = {"right": one_hot[None]} | ({} if two_sided else {"left": one_hot[:, None]})
    for hook in hooks:
        hook.load_state_dict({"m": {"error": torch.zeros(8, 8)} | factors})
    gradients = [{"m": torch.ones(8, 8)} for _ in hooks]
    gradients[1]["m"][5, 5] = torch.inf
    states = [hook.state_dict() for hook in hooks]
    for result in take_step(hooks, gradients, 0):
        assert result.isnan().all()
    for hook, state in zip(hooks, states, strict=True):
        assert_same_state(hook, state)


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("huge", [3e38, 1e38, 1e36, 1e34, 1e30])
def test_numbers_near_overflow_never_poison_the_state(two_sided, huge):
    hooks = [powersgd(two_sided=two_sided) for _ in range(2)]
    for step in range(2):
        gradients = [gradients_of(rank, step, torch.float32) for rank in range(2)]
        for named in gradients:
            named["first"] *= huge / 4
        gradients[1]["first"] *= -1
        take_step(hooks, gradients, step)
        for hook in hooks:
            assert all(tensor.isfinite().all() for *_, tensor in tensors_of(hook.state))


# ----------------------------------------------------------------------------- layouts, buckets


def test_channels_last_is_seen_in_its_own_order():
    """The same rows in another order of columns: the results are the same numbers, moved."""
    weight = torch.randn(12, 5, 3, 3, dtype=torch.float64)
    outer = torch.randn(12, 1, 1, 1).double() @ torch.ones(1, 1).double() * weight[:1]  # rank 1
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        gradient = outer.contiguous(memory_format=memory_format)
        bucket = make_bucket({"weight": gradient})
        lockstep([powersgd(rank=1)], [bucket])
        results.append(bucket.gradients()[0].clone())
        assert results[-1].stride() == gradient.stride()
    for result in results:
        torch.testing.assert_close(result, outer)


def test_state_follows_parameters_into_other_buckets():
    """One bucket, two, and one in another order give the same numbers."""
    divisions = [
        [list(SHAPES)],
        [["third", "bias", "first"], ["convolution", "empty", "second", "scalar"]],
        [list(reversed(SHAPES))],
    ]
    fixed, moving = powersgd(), powersgd()
    for step in range(9):
        gradients = gradients_of(0, step)
        expected = by_name(take_step([fixed], [gradients], step)[0])
        for names in divisions[step // 3]:
            bucket = make_bucket({name: gradients[name] for name in names}, step)
            lockstep([moving], [bucket])
            for name, result in zip(names, bucket.gradients(), strict=True):
                torch.testing.assert_close(result, expected[name])
    errors = [t for _, field, t in tensors_of(moving.state) if field == "error"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in errors}
    assert sum(storages.values()) == sum(t.nbytes for t in errors), "old memory is still held"


@pytest.mark.parametrize("options", [{}, {"two_sided": False}, {"warm_start": False}])
def test_resumes_bitwise(options):
    hook = powersgd(**options)
    for step in range(3):
        take_step([hook], [gradients_of(0, step)], step)
    file = io.BytesIO()
    torch.save(hook.state_dict(), file)
    file.seek(0)
    resumed = powersgd(**options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        (expected,) = take_step([hook], [gradients_of(0, step)], step)
        (found,) = take_step([resumed], [gradients_of(0, step)], step)
        assert torch.equal(found, expected)
    assert_same_state(resumed, hook.state)


def test_loading_a_state_in_the_middle_of_training():
    hook = powersgd()
    take_step([hook], [gradients_of(0, 0)], 0)
    saved = hook.state_dict()
    (expected,) = take_step([hook], [gradients_of(0, 1)], 1)
    hook.load_state_dict(saved)
    assert_same_state(hook, saved)
    (found,) = take_step([hook], [gradients_of(0, 1)], 1)
    assert torch.equal(found, expected)


def test_state_of_another_rank_is_refused():
    saved = powersgd(rank=2)
    take_step([saved], [gradients_of(0, 0)], 0)
    hook = powersgd(rank=3)
    hook.load_state_dict(saved.state_dict())
    with pytest.raises(CommHookStateError, match=r"'first'.*\(3, 17\).*\(2, 17\)"):
        take_step([hook], [gradients_of(0, 0)], 0)


def test_seed_and_name_decide_the_first_factors():
    def first_factors(hook: PowerSGD, names: list[str]) -> dict[str, Tensor]:
        bad = {name: torch.full((23, 17), torch.nan) for name in names}
        take_step([hook], [bad], 0)
        return {name: hook.state[name]["right"] for name in names}

    one = first_factors(powersgd(), ["a", "b"])
    other = first_factors(powersgd(), ["b", "c", "a"])
    assert torch.equal(one["a"], other["a"])
    assert torch.equal(one["b"], other["b"])
    assert not torch.equal(one["a"], one["b"])
    assert not torch.equal(one["a"], first_factors(powersgd(seed=1), ["a"])["a"])
