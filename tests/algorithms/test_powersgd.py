"""Test PowerSGD against its paper: references and invariants, and what it sends and keeps."""

import copy
import itertools
import math

import pytest
import torch
from support.lockstep import lockstep, make_bucket, take_step
from support.powersgd_steps import (
    MATRICES,
    SHAPES,
    assert_same_state,
    by_name,
    gradients_of,
    mean_of,
    powersgd,
    tensors_of,
)
from support.reference import powersgd_one_sided, powersgd_two_sided
from torch import Tensor

from commhooks.algorithms.lowrank.compressor import orthonormal_basis
from commhooks.algorithms.lowrank.matrix_plan import Side

# ----------------------------------------------------------------------------- against the paper


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("two_sided", [True, False])
def test_follows_the_reference(two_sided, world_size):
    hooks = [powersgd(two_sided=two_sided) for _ in range(world_size)]
    kept: dict[str, tuple[list[Tensor], Tensor]] = {}
    for step in range(5):
        gradients = [gradients_of(rank, step) for rank in range(world_size)]
        results = [by_name(flat) for flat in take_step(hooks, gradients, step)]
        for name in SHAPES:
            of_ranks = [named[name] for named in gradients]
            if name not in MATRICES:
                expected = mean_of(of_ranks)
            else:
                matrices = [gradient.flatten(1) for gradient in of_ranks]
                if name not in kept:
                    kept[name] = [torch.zeros_like(m) for m in matrices], starting_factor(name)
                errors, factor = kept[name]
                if two_sided:
                    average, errors, factor = powersgd_two_sided(matrices, errors, factor)
                elif step % 2 == 0:
                    average, errors, factor = powersgd_one_sided(matrices, errors, factor)
                else:
                    average, errors, factor = powersgd_one_sided(
                        [m.T for m in matrices], [e.T for e in errors], factor
                    )
                    average, errors = average.T, [error.T for error in errors]
                kept[name] = errors, factor
                expected = average.reshape(SHAPES[name])
                for hook, error in zip(hooks, errors, strict=True):
                    torch.testing.assert_close(hook.state[name]["error"], error)
            for result in results:
                torch.testing.assert_close(result[name], expected)


@pytest.mark.parametrize("iterations", [2, 3])
@pytest.mark.parametrize("two_sided", [True, False])
def test_further_iterations_send_what_is_left(two_sided, iterations):
    """Each one is a step of the reference on zero gradients and the errors of the last one."""
    hooks = [powersgd(two_sided=two_sided, num_iters_per_step=iterations) for _ in range(2)]
    factor = starting_factor("first")
    errors = [torch.zeros(23, 17, dtype=torch.float64) for _ in hooks]
    is_left = True
    for step in range(3):
        gradients = [gradients_of(rank, step) for rank in range(2)]
        results = take_step(hooks, gradients, step)
        expected = torch.zeros(23, 17, dtype=torch.float64)
        given = [named["first"] for named in gradients]
        for _ in range(iterations):
            if two_sided:
                average, errors, factor = powersgd_two_sided(given, errors, factor)
            elif is_left:
                average, errors, factor = powersgd_one_sided(given, errors, factor)
            else:
                average, errors, factor = powersgd_one_sided(
                    [g.T for g in given], [e.T for e in errors], factor
                )
                average, errors = average.T, [error.T for error in errors]
            is_left = not is_left
            expected += average
            given = [torch.zeros_like(g) for g in given]
        for result in results:
            torch.testing.assert_close(by_name(result)["first"], expected)
        for hook, error in zip(hooks, errors, strict=True):
            torch.testing.assert_close(hook.state["first"]["error"], error)


@pytest.mark.parametrize("two_sided", [True, False])
def test_overflow_in_a_further_half_step_leaves_no_trace(two_sided):
    """P = M·Qᵀ is at most √17 times as large as M, and sent; Q = Pᵀ·M is √60 times as large."""
    hook = powersgd(rank=1, two_sided=two_sided, num_iters_per_step=2)
    lockstep([hook], [make_bucket({"m": torch.randn(60, 17)}, 0)])
    state = hook.state_dict()
    (result,), (comm,) = lockstep([hook], [make_bucket({"m": torch.full((60, 17), 1e33)}, 2)])
    assert comm.sent[0].isfinite().all()
    assert len(comm.sent) == 2
    assert comm.sent[1].isnan().any()
    assert result.isnan().all()
    assert_same_state(hook, state)


def starting_factor(name: str) -> Tensor:
    """The Q, (m, r), of step 0: that of a hook that has only seen a gradient of inf."""
    hook = powersgd()
    take_step([hook], [{k: g.fill_(torch.inf) for k, g in gradients_of(0, 0).items()}], 0)
    return hook.state[name]["right"].T.clone()


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sent_plus_error_is_gradient_plus_old_error(dtype, two_sided):
    """It holds on every rank; a single rank sends exactly the result, so one rank shows it."""
    hook = powersgd(two_sided=two_sided)
    # Rounding of the result, and of float32 where the result has more digits than that.
    tolerance = 20 * max(torch.finfo(dtype).eps, torch.finfo(torch.float64).eps)
    old = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in MATRICES}
    for step in range(6):
        gradients = gradients_of(0, step, dtype)
        result = by_name(take_step([hook], [gradients], step)[0])
        for name in MATRICES:
            error = hook.state[name]["error"].double().view(SHAPES[name])
            left = result[name].double() + error
            right = gradients[name].double() + old[name]
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
            old[name] = error.clone()


@pytest.mark.parametrize("two_sided", [True, False])
def test_nothing_is_lost_in_the_mean(two_sided):
    hooks = [powersgd(two_sided=two_sided) for _ in range(3)]
    given = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in MATRICES}
    got = copy.deepcopy(given)
    for step in range(7):
        gradients = [gradients_of(rank, step) for rank in range(3)]
        result = by_name(take_step(hooks, gradients, step)[0])
        for name in MATRICES:
            given[name] += mean_of([named[name] for named in gradients])
            got[name] += result[name]
    for name in MATRICES:
        error = mean_of([hook.state[name]["error"] for hook in hooks]).view(SHAPES[name])
        torch.testing.assert_close(got[name] + error, given[name])


def test_results_beyond_the_range_of_float16_are_sent_later():
    """Errors are float32; sending one vector of 64 at a time makes them and products large."""
    hook = powersgd(rank=1)
    gradient = 4000 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    given, got = torch.zeros(2, 64 * 64, dtype=torch.float64)
    is_clamped = False
    for step in range(60):
        given += gradient.half().double().flatten()
        (result,) = take_step([hook], [{"w": gradient.half()}], step)
        assert result.isfinite().all()
        is_clamped |= bool((result.abs() == torch.finfo(torch.float16).max).any())
        got += result
    assert is_clamped
    missing = hook.state["w"]["error"].double().flatten()
    rounding = 60 * 16  # of results up to 65504, at most 16 in each step
    assert (got + missing - given).abs().max() <= rounding


def test_own_error_is_never_longer_than_what_was_to_be_sent():
    hooks = [powersgd() for _ in range(2)]
    old = [{name: torch.zeros(()) for name in MATRICES} for _ in hooks]
    for step in range(5):
        gradients = [gradients_of(rank, step) for rank in range(2)]
        before = copy.deepcopy(gradients)
        take_step(hooks, gradients, step)
        for hook, named, errors in zip(hooks, before, old, strict=True):
            for name in MATRICES:
                error = hook.state[name]["error"].view(SHAPES[name]).clone()
                assert error.norm() <= (named[name] + errors[name]).norm()
                errors[name] = error


def test_mean_of_low_rank_is_found_in_one_step():
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(30, 2, generator=generator) @ torch.randn(2, 40, generator=generator)
    difference = torch.randn(30, 40, generator=generator)
    hooks = [powersgd(error_feedback=False) for _ in range(2)]
    results = take_step(hooks, [{"m": mean + difference}, {"m": mean - difference}], 0)
    # of float32 numbers that are about 10 and cancel
    torch.testing.assert_close(results[0].view(30, 40), mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("two_sided", [True, False])
def test_full_rank_is_exact(two_sided):
    hooks = [powersgd(rank=64, min_compression_rate=0.0, two_sided=two_sided) for _ in range(2)]
    # One-sided, only a square factor keeps everything, so the matrix has to be square.
    gradients = [{"m": gradients_of(rank, 0)["first"][:17]} for rank in range(2)]
    expected = mean_of([named["m"] for named in gradients])
    for result in take_step(hooks, gradients, 0):
        torch.testing.assert_close(result.view(17, 17), expected)


@pytest.mark.parametrize("side", list(Side))
def test_bases_are_orthonormal_for_every_matrix(side):
    factors = torch.randn(4, 30, 3, dtype=torch.float64)
    factors[1] = 0
    factors[2, :, 1] = 0
    factors[3] *= 1e-30
    factors[3, :, 2] = factors[3, :, 0]
    basis = orthonormal_basis(side, factors if side is Side.LEFT else factors.mT)
    columns = basis if side is Side.LEFT else basis.mT
    torch.testing.assert_close(columns.mT @ columns, torch.eye(3).double().expand(4, 3, 3))
    residual = factors[0] - columns[0] @ (columns[0].mT @ factors[0])
    torch.testing.assert_close(residual, torch.zeros(30, 3).double())


# ------------------------------------------------------------------------------------- the wire


def test_two_sided_sends_twice_and_one_sided_once():
    n, m, r = 23, 17, 2
    left = r * (3 * n + 9)
    right = r * (3 * m + 45)
    exact = 1 + 23
    bucket = make_bucket(gradients_of(0, 0))
    (comm,) = lockstep([powersgd()], [bucket])[1]
    assert [sent.numel() for sent in comm.sent] == [left + exact, right]
    (comm,) = lockstep([powersgd(num_iters_per_step=2)], [make_bucket(gradients_of(0, 0))])[1]
    assert [sent.numel() for sent in comm.sent] == [left + exact, right, left, right]
    for step, factors in ((0, left), (1, right)):
        (comm,) = lockstep([powersgd(two_sided=False)], [make_bucket(gradients_of(0, 0), step)])[1]
        assert [sent.numel() for sent in comm.sent] == [factors + exact]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("two_sided", [True, False])
def test_cost_formula(two_sided, iterations, dtype):
    """After a first step of exact averages: r·n or r·m of each matrix in turn, and exact ranges.

    Of three ranks each sends 2·2·⌈b/3⌉ in an all-reduce of b bytes.
    """
    width = max(4, dtype.itemsize)
    left, right = 2 * (3 * 23 + 9) * width, 2 * (3 * 17 + 45) * width
    exact, everything = (1 + 23) * width, (1 + 23 + 3 * 23 * 17 + 9 * 45) * dtype.itemsize
    options = {"two_sided": two_sided, "num_iters_per_step": iterations, "start_step": 1}
    hooks = [powersgd(**options) for _ in range(3)]
    half_steps = itertools.cycle([left, right])
    for step in range(4):
        if step == 0:
            payloads = [everything]
        else:
            payloads = [next(half_steps) for _ in range(iterations * (1 + two_sided))]
            payloads[0] += exact
        expected = sum(4 * math.ceil(payload / 3) for payload in payloads)
        if step == 0 and not two_sided:  # goes on as if step 0 had been compressed
            for _ in range(iterations):
                next(half_steps)
        buckets = [make_bucket(gradients_of(rank, step, dtype), step) for rank in range(3)]
        assert hooks[0].wire_bytes(buckets[0], 3) == expected
        for comm in lockstep(hooks, buckets)[1]:
            assert sum(4 * math.ceil(sent.nbytes / 3) for sent in comm.sent) == expected


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_factors_and_errors_are_at_least_float32(dtype, wire_dtype, two_sided):
    hook = powersgd(two_sided=two_sided)
    (result,), (comm,) = lockstep([hook], [make_bucket(gradients_of(0, 0, dtype))])
    assert result.dtype == dtype
    assert {sent.dtype for sent in comm.sent} == {wire_dtype}
    assert {tensor.dtype for *_, tensor in tensors_of(hook.state)} == {wire_dtype}


def test_buckets_without_matrices_send_once_or_nothing():
    (result,), (comm,) = lockstep([powersgd()], [make_bucket({"bias": torch.ones(5)})])
    assert torch.equal(result, torch.ones(5))
    assert len(comm.sent) == 1
    (result,), (comm,) = lockstep([powersgd()], [make_bucket({"empty": torch.ones(0, 3)})])
    assert result.numel() == 0
    assert comm.sent == []


def test_starts_with_exact_averages():
    hooks = [powersgd(start_step=3) for _ in range(2)]
    for step in range(4):
        gradients = [gradients_of(rank, step) for rank in range(2)]
        expected = [mean_of([named[name] for named in gradients]).flatten() for name in SHAPES]
        results = take_step(hooks, gradients, step)
        assert torch.allclose(results[0], torch.cat(expected)) == (step < 3)
        assert bool(hooks[0].state) == (step == 3)


# --------------------------------------------------------------------------------------- memory


def test_one_extra_copy_and_the_bucket_is_written_in_place():
    hook = powersgd(rank=1, two_sided=False)
    bucket = make_bucket(gradients_of(0, 0))
    (result,), _ = lockstep([hook], [bucket])
    assert result.data_ptr() == bucket.buffer().data_ptr()
    errors = {
        t.untyped_storage().data_ptr(): t for _, f, t in tensors_of(hook.state) if f == "error"
    }
    elements = sum(t.untyped_storage().nbytes() // t.element_size() for t in errors.values())
    assert elements == sum(torch.Size(SHAPES[name]).numel() for name in MATRICES)
    assert len(errors) == 1  # of the bucket


@pytest.mark.parametrize("two_sided", [True, False])
def test_without_error_feedback_no_error_is_kept(two_sided):
    hook = powersgd(error_feedback=False, two_sided=two_sided)
    take_step([hook], [gradients_of(0, 0)], 0)
    assert "error" not in {name for _, name, _ in tensors_of(hook.state)}


def test_without_warm_start_every_step_draws_other_factors():
    hook = powersgd(warm_start=False, error_feedback=False)
    results = [take_step([hook], [gradients_of(0, 0)], step)[0] for step in (0, 1, 0)]
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert hook.state == {}
