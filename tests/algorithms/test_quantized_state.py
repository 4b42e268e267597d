"""The state of hooks that quantize."""

from typing import Any

import pytest
import torch
from support.lockstep import lockstep, make_bucket, take_step
from support.quantized_steps import (
    ALL,
    NUMEL,
    SHAPES,
    STATELESS,
    WITH_ERRORS,
    flat,
    gradients_of,
    make_hooks,
    part_length,
    unsent,
)
from torch import Tensor

import commhooks
from commhooks.hook.state import entry_problem
from commhooks.testing.compare import same_bits, through_file


@pytest.mark.parametrize("name", STATELESS)
def test_there_is_no_state_without_error_feedback(name):
    hooks = make_hooks(name, STATELESS[name][0], 2)
    take_step(hooks, [gradients_of(rank, 0) for rank in range(2)], 0)
    assert hooks[0].state == {}


def test_state_holds_errors_and_a_part_of_the_average_errors():
    hooks = make_hooks("int8", {}, 4)
    take_step(hooks, [gradients_of(rank, 0) for rank in range(4)], 0)
    length = part_length(NUMEL, 4)
    for hook, own in zip(hooks, (length, length, length, NUMEL - 3 * length), strict=True):
        entries = [tensor for entry in hook.state.values() for tensor in entry.values()]
        tensors = [tensor for tensor in entries if tensor.is_floating_point()]
        memories = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sorted(memories.values()) == [4 * own, 4 * NUMEL]


@pytest.mark.parametrize(("bad", "where"), [(torch.inf, "matrix"), (torch.nan, "scalar")])
@pytest.mark.parametrize("step_of_bad", [0, 2])
@pytest.mark.parametrize(("name", "options", "bits"), ALL)
def test_a_gradient_that_is_not_finite_changes_no_state(
    name, options, bits, step_of_bad, bad, where
):
    hooks, twins = make_hooks(name, options, 3), make_hooks(name, options, 3)
    for step in range(step_of_bad):
        for hook_set in (hooks, twins):
            take_step(hook_set, [gradients_of(rank, step) for rank in range(3)], step)
    states = [hook.state_dict() for hook in hooks]
    gradients = [gradients_of(rank, 50) for rank in range(3)]
    gradients[1][where].view(-1)[-1] = bad
    for result in take_step(hooks, gradients, step_of_bad):
        assert result.isnan().all()
    if step_of_bad:
        assert same_bits([hook.state_dict() for hook in hooks], states)
    results = [
        take_step(hook_set, [gradients_of(rank, 51) for rank in range(3)], step_of_bad + 1)
        for hook_set in (hooks, twins)
    ]
    assert same_bits(*results)
    assert results[0][0].isfinite().all()


@pytest.mark.parametrize("huge", [3e38, 1e38, 5e37])
@pytest.mark.parametrize(("name", "options", "bits"), ALL)
def test_state_stays_finite_near_overflow(name, options, bits, huge):
    hooks = make_hooks(name, options, 2)
    for step in range(3):
        gradients = [gradients_of(rank, step) for rank in range(2)]
        gradients[0]["matrix"].fill_(huge)
        take_step(hooks, gradients, step)
        for hook in hooks:
            for entry in hook.state.values():
                assert all(tensor.isfinite().all() for tensor in entry.values())


@pytest.mark.parametrize(("name", "options", "bits"), ALL)
def test_zeros_give_zeros(name, options, bits):
    hooks = make_hooks(name, options, 3)
    for step in range(2):
        zeros = [{k: torch.zeros_like(g) for k, g in gradients_of(0, 0).items()} for _ in hooks]
        for result in take_step(hooks, zeros, step):
            assert torch.equal(result, torch.zeros(NUMEL))


def buckets_of(gradients: list[dict[str, Tensor]], names: tuple[str, ...], step: int) -> list[Any]:
    return [make_bucket({name: named[name] for name in names}, step) for named in gradients]


@pytest.mark.parametrize("name", WITH_ERRORS)
@pytest.mark.parametrize(
    "rebuilt", [(("bias", "convolution"), ("matrix",)), (("convolution", "bias", "matrix"),)]
)
def test_errors_survive_rebuilt_buckets(name, rebuilt):
    size = 3
    hooks = make_hooks(name, WITH_ERRORS[name][0], size)
    names = ("matrix", "bias", "convolution")
    gradients = [gradients_of(rank, 0, torch.float64) for rank in range(size)]
    lockstep(hooks, buckets_of(gradients, names, 0))
    before = unsent(hooks, dict.fromkeys(names))
    zeros = [{k: torch.zeros_like(g) for k, g in gradients[0].items()} for _ in hooks]
    got: dict[str, Tensor] = {}
    for bucket in rebuilt:
        result = lockstep(hooks, buckets_of(zeros, bucket, 1))[0][0]
        lengths = [torch.Size(SHAPES[k]).numel() for k in bucket]
        got |= dict(zip(bucket, result.split(lengths), strict=True))
    after = unsent(hooks, dict.fromkeys(names))
    for k in names:
        torch.testing.assert_close(got[k] + after[k], before[k], rtol=0, atol=64 * 2.0**-22)


def test_errors_survive_a_change_of_the_number_of_ranks():
    """Errors of averages become own errors, multiplied by the number of ranks."""
    three = make_hooks("int4", {}, 3)
    take_step(three, [gradients_of(rank, 0, torch.float64) for rank in range(3)], 0)
    saved = three[1].state_dict()
    alone = commhooks.create("int4")
    alone.load_state_dict(through_file(saved))
    zeros = {k: torch.zeros_like(g).double() for k, g in gradients_of(0, 0).items()}
    result = take_step([alone], [zeros], 1)[0]
    expected = flat(unsent([three[1]], SHAPES))
    torch.testing.assert_close(
        result + flat(unsent([alone], SHAPES)), expected, rtol=0, atol=64 * 2.0**-22
    )


def test_errors_survive_registration_with_other_ranks():
    """With fewer ranks, each one keeps errors of a larger part of the averages."""
    hooks = make_hooks("int4", {}, 3)
    take_step(hooks, [gradients_of(rank, 0, torch.float64) for rank in range(3)], 0)
    hooks = hooks[:2]
    expected = flat(unsent(hooks, SHAPES))
    zeros = [
        {k: torch.zeros_like(g).double() for k, g in gradients_of(0, 0).items()} for _ in hooks
    ]
    result = take_step(hooks, zeros, 1)[0]
    torch.testing.assert_close(
        result + flat(unsent(hooks, SHAPES)), expected, rtol=0, atol=64 * 2.0**-22
    )


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (None, "expected both 'average_start' and 'average_error'"),
        (-2, "expected 0 to 20, found -2"),
        (21, "expected 0 to 20, found 21"),
        (20, None),
    ],
)
def test_the_kept_error_lies_inside_the_parameter(start, problem):
    entry = {"error": torch.zeros(23), "average_error": torch.ones(3)}
    if start is not None:
        entry["average_start"] = torch.tensor(start)
    found = entry_problem(entry, commhooks.create("int8").state_fields(torch.zeros(23)))
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(("name", "options", "bits"), ALL)
def test_resuming_from_a_file_gives_the_same_bits(name, options, bits):
    hooks = make_hooks(name, options, 3)
    for step in range(2):
        take_step(hooks, [gradients_of(rank, step) for rank in range(3)], step)
    resumed = make_hooks(name, options, 3)
    for hook, other in zip(hooks, resumed, strict=True):
        other.load_state_dict(through_file(hook.state_dict()))
    for step in range(2, 4):
        gradients = [gradients_of(rank, step) for rank in range(3)]
        copies = [{k: g.clone() for k, g in named.items()} for named in gradients]
        assert same_bits(take_step(hooks, gradients, step), take_step(resumed, copies, step))
    assert same_bits([h.state_dict() for h in hooks], [h.state_dict() for h in resumed])


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "natural"])
def test_random_numbers_depend_on_seed_step_rank_and_bucket(name):
    def result(seed: int = 0, step: int = 0, parameter: str = "g") -> Tensor:
        hooks = make_hooks(name, {"seed": seed}, 2)
        gradients = [torch.linspace(-1, 1, 500) for _ in hooks]
        return take_step(hooks, [{parameter: g} for g in gradients], step)[0]

    assert torch.equal(result(), result())
    assert not torch.equal(result(), result(seed=1))
    assert not torch.equal(result(), result(step=1))
    assert not torch.equal(result(), result(parameter="h"))
    hooks = make_hooks(name, {}, 2)
    buckets = [make_bucket({"g": torch.linspace(-1, 1, 500)}) for _ in hooks]
    first, second = lockstep(hooks, buckets)[1]
    assert not torch.equal(first.sent[0], second.sent[0])
