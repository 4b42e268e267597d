"""Hooks that quantize: averages, errors, bytes on the wire, and contributions."""

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.lockstep import RecordingCommunicator, lockstep, make_bucket, take_step
from support.quantized_steps import (
    ALL,
    AVERAGE_BITS,
    NUMEL,
    SHAPES,
    STATELESS,
    UNBIASED,
    WITH_ERRORS,
    flat,
    gradients_of,
    make_hooks,
    mean_of,
    part_length,
    unsent,
)
from support.reference import quantized_two_shot
from torch import Tensor

import commhooks
from commhooks import CommHookOptionError
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

# --------------------------------------------------------------------------------------- averages


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", WITH_ERRORS)
def test_results_and_errors_sum_to_the_gradients(name, size):
    """The sum of results, own errors and errors of averages is the sum of mean gradients."""
    hooks = make_hooks(name, WITH_ERRORS[name][0], size)
    given = torch.zeros(NUMEL, dtype=torch.float64)
    got = given.clone()
    for step in range(5):
        gradients = [gradients_of(rank, step, torch.float64) for rank in range(size)]
        given += mean_of(gradients)
        results = take_step(hooks, gradients, step)
        got += results[0]
        assert all(torch.equal(result, results[0]) for result in results)
    missing = flat(unsent(hooks, SHAPES))
    # Averages are summed in float32 from numbers below 64.
    assert (got + missing - given).abs().max() <= 5 * (size + 2) * 64 * 2.0**-24
    assert missing.abs().max() > 1e-4  # so quantization did change numbers


def documented_quantize(name: str, **constants: Any) -> Callable[[Tensor], Tensor]:
    """Return the function ``quantize`` from the algorithm in the docstring of a hook."""
    document = type(commhooks.create(name)).__doc__
    assert document is not None
    algorithm = document.partition("::\n\n")[2].partition("\n\n")[0]
    names = {"torch": torch, **constants}
    exec(textwrap.dedent(algorithm), names)
    quantize: Callable[[Tensor], Tensor] = names["quantize"]
    return quantize


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["int8", "int2", "fp8", "onebit", "signsgd"])
def test_the_documented_algorithm_gives_the_results_and_the_errors(name, size):
    quantize = documented_quantize(name)
    blocks, block_size = 3 * size, 32
    hooks = make_hooks(name, {"block_size": block_size}, size)
    errors = [torch.zeros(blocks, block_size) for _ in range(size)]
    average_error = torch.zeros(blocks, block_size)
    generator = torch.Generator().manual_seed(size)
    for step in range(3):
        gradients = [torch.randn(blocks, block_size, generator=generator) for _ in range(size)]
        expected, errors, average_error = quantized_two_shot(
            gradients, errors, average_error, quantize
        )
        for result in take_step(hooks, [{"g": gradient.clone()} for gradient in gradients], step):
            torch.testing.assert_close(result.view_as(expected), expected, rtol=0, atol=1e-5)
        for rank, hook in enumerate(hooks):
            torch.testing.assert_close(hook.state["g"]["error"], errors[rank], rtol=0, atol=1e-5)
            own = hook.state["g"]["average_error"].view(3, block_size)
            part = average_error[3 * rank : 3 * rank + 3]
            torch.testing.assert_close(own, part, rtol=0, atol=1e-5)


def assert_mean_within_6_standard_errors(samples: Tensor, exact: Tensor) -> None:
    """Compare the mean over dimension 0 with ``exact``, element by element.

    Most elements vary. One that is rarely not zero may have been zero in all samples, so each bound
    counts at least a tenth of the largest deviation.
    """
    deviation = samples.std(0)
    assert (deviation > 0).double().mean() > 0.8
    bound = 6 * deviation.clamp(min=deviation.max() / 10) / len(samples) ** 0.5
    assert ((samples.mean(0) - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("name", "constants"),
    [("qsgd", {"levels": 7}), ("terngrad", {"clip": torch.inf}), ("natural", {})],
)
def test_the_documented_rounding_is_unbiased(name, constants):
    quantize = documented_quantize(name, **constants)
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    samples = quantize(x.repeat(4000, 1)).view(4000, *x.shape)
    assert_mean_within_6_standard_errors(samples.double(), x.double())


@pytest.mark.parametrize(("name", "options"), UNBIASED)
def test_unbiased(name, options):
    """The mean over steps is the average, up to 6 standard errors, and steps differ."""
    steps, numel, size = 400, 40, 2
    hooks = make_hooks(name, options | {"block_size": 32}, size)
    gradients = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    results = torch.stack(
        [take_step(hooks, [{"g": g.clone()} for g in gradients], step)[0] for step in range(steps)]
    ).double()
    exact = torch.stack(gradients).double().mean(0)
    assert_mean_within_6_standard_errors(results, exact)


@pytest.mark.parametrize(
    ("name", "relative"),
    [("int8", 2 / 254), ("int4", 2 / 14), ("int2", 1.0), ("fp8", 2 / 32 + 2 / 448), ("fp4", 2 / 5)],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_step_has_the_error_of_two_roundings(name, relative, size):
    hooks = make_hooks(name, {}, size)
    gradients = [gradients_of(rank, 0) for rank in range(size)]
    largest = max(flat(named).abs().max() for named in gradients)
    expected = mean_of(gradients)
    result = take_step(hooks, gradients, 0)[0]
    assert (result - expected).abs().max() <= 1.1 * relative * largest
    # A result of zeros is within the bound of int2, which clamps half of the largest numbers.
    assert (result - expected).norm() <= 0.6 * expected.norm()


@pytest.mark.parametrize("size", [1, 2])
def test_terngrad_clips_once(size):
    """A number among zeros is clamped to 2.5 root mean squares; averages are not clamped again."""
    hooks = make_hooks("terngrad", {}, size)
    gradient = torch.zeros(512 * size)
    gradient[::512] = 1.0
    steps = [take_step(hooks, [{"g": gradient.clone()} for _ in hooks], s)[0] for s in range(4)]
    for result in steps:
        assert torch.allclose(result, gradient * 2.5 * 512**-0.5)


def test_majority_vote():
    hooks = make_hooks("signsgd", {"error_feedback": False, "block_size": 32}, 3)
    gradients = [gradients_of(rank, 0) for rank in range(3)]
    votes = torch.stack([flat(named).sign() for named in gradients]).sum(0)
    result = take_step(hooks, gradients, 0)[0]
    assert torch.equal(result.sign().double(), votes.sign())


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 5, 31, 33, 64, 257])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_length_on_any_number_of_ranks(numel, size):
    hooks = make_hooks("int8", {"block_size": 32}, size)
    gradients = [{"g": torch.arange(numel) / 7.0 + rank} for rank in range(size)]
    expected = mean_of(gradients)
    for result in take_step(hooks, gradients, 0):
        assert result.shape == (numel,)
        assert ((result - expected).abs() <= 2 * (numel / 7 + size) / 127).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("name", "options", "bits"), ALL)
def test_dtypes(name, options, bits, dtype):
    hooks = make_hooks(name, options, 2)
    twins = make_hooks(name, options, 2)
    for step in range(2):
        gradients = [gradients_of(rank, step, dtype) for rank in range(2)]
        result = take_step(hooks, gradients, step)[0]
        assert result.dtype == dtype
        if dtype != torch.float64:
            wide = [{k: g.float() for k, g in named.items()} for named in gradients]
            assert torch.equal(result, take_step(twins, wide, step)[0].to(dtype))
    for entry in hooks[0].state.values():
        assert entry["error"].dtype == torch.promote_types(dtype, torch.float32)


# --------------------------------------------------------------------------------------- the wire


def encoded_bytes(numel: int, bits: int, block: int, group: int = 0) -> int:
    scales = 4 * ((numel + block - 1) // block)
    words = (numel * bits + 31) // 32
    if group:
        words += (numel + 4 * group - 1) // (4 * group)
    return scales + 4 * words


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "options", "bits"), ALL)
def test_messages_have_the_length_of_the_formula(name, options, bits, size):
    hooks = make_hooks(name, options, size)
    bucket = [make_bucket(gradients_of(rank, 0)) for rank in range(size)]
    _, comms = lockstep(hooks, bucket)
    length, block = part_length(NUMEL, size), options.get("block_size", 1024)
    group = {"mxfp4": 32, "nvfp4": 16, "e3m0": 0}[hooks[0].format] if name == "fp4" else 0
    own = encoded_bytes(length, bits, block, group)
    average = encoded_bytes(length, AVERAGE_BITS.get(name, bits), block, group)
    for comm in comms:
        assert [sent.numel() for sent in comm.sent] == [size * own, average]
    assert hooks[0].wire_bytes(bucket[0], size) == (size - 1) * (own + average)


def bytes_of_training(rank: int, size: int, name: str) -> tuple[int, int]:
    parameters = probe_parameters()
    trainer = Trainer(commhooks.create(name), parameters, bucket_cap_mb=25, stable_buckets=True)
    for step in range(2):
        trainer.step(draw_gradients(parameters, rank, step))
    return trainer.handle.stats().total.wire_bytes, sum(p.numel() for p in parameters.values())


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "bits", "block"), [("int8", 8, 256), ("terngrad", 2, 512), ("onebit", 1, 128)]
)
def test_counted_bytes(run_ranks, name, bits, block, size):
    for counted, numel in run_ranks(bytes_of_training, size, name):
        own = encoded_bytes(part_length(numel, size), bits, block)
        average = encoded_bytes(part_length(numel, size), AVERAGE_BITS.get(name, bits), block)
        assert counted == (size - 1) * (own + average)  # per step


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("int8", 3.9), ("fp8", 3.9), ("natural", 3.9), ("int4", 7.5), ("int2", 12.8), ("fp4", 7.0),
     ("qsgd", 7.5), ("terngrad", 10.4), ("onebit", 25), ("signsgd", 25)],
)  # fmt: skip
def test_default_compression(name, ratio):
    bucket = make_bucket({"g": torch.zeros(1 << 20)})
    plain = 2 * 3 * (4 << 20) // 4
    assert plain / commhooks.create(name).wire_bytes(bucket, 4) >= ratio


# ----------------------------------------------------------------------------------- contribution


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(STATELESS.keys() - {"signsgd", "terngrad"}))
def test_contributions_average_to_the_result(name, size):
    hooks = make_hooks(name, STATELESS[name][0], size)
    buckets = [make_bucket(gradients_of(rank, 0)) for rank in range(size)]
    results, comms = lockstep(hooks, buckets, wants_contribution=True)
    contributions = [contribution_of(comm) for comm in comms]
    mean = torch.stack(contributions).mean(0)
    torch.testing.assert_close(mean, results[0].double(), rtol=0, atol=64 * size * 2.0**-23)
    assert all(hook.tells_contribution for hook in hooks)
    # Asking for the contribution does not change the results.
    twins = take_step(
        make_hooks(name, STATELESS[name][0], size),
        [gradients_of(rank, 0) for rank in range(size)],
        0,
    )
    assert same_bits(results, twins)


def contribution_of(comm: RecordingCommunicator) -> Tensor:
    assert comm.contribution is not None
    return comm.contribution.double()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int8", {}),
        ("signsgd", {"error_feedback": False}),
        ("terngrad", {}),
        ("qsgd", {"levels": 2}),
    ],
)
def test_some_hooks_do_not_tell_a_contribution(name, options):
    hook = commhooks.create(name, **options)
    assert not hook.tells_contribution
    comm = lockstep([hook], [make_bucket(gradients_of(0, 0))], wants_contribution=True)[1][0]
    assert comm.contribution is None


# ---------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int8", {"block_size": 100}, "a multiple of 32; found 100"),
        ("int8", {"block_size": 8192}, "<= 4096"),
        ("fp8", {"format": "e3m4"}, "'e4m3', 'e5m2'"),
        ("qsgd", {"levels": 0}, ">= 1"),
        ("qsgd", {"levels": 128}, "<= 127"),
        ("qsgd", {"norm": "l1"}, "'max', 'l2'"),
        ("terngrad", {"clip": -1.0}, ">= 0"),
        ("signsgd", {"error_feedback": "yes"}, "bool"),
        ("onebit", {"block_size": 0}, ">= 32"),
    ],
)
def test_options_out_of_range_raise(name, options, message):
    with pytest.raises(CommHookOptionError, match=message):
        commhooks.create(name, **options)


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (2, 4), (7, 4), (8, 8), (127, 8)])
def test_qsgd_uses_the_narrowest_codes(levels, bits):
    hook = commhooks.create("qsgd", levels=levels, block_size=32)
    bucket = make_bucket({"g": torch.zeros(640)})
    assert hook.wire_bytes(bucket, 2) == 2 * encoded_bytes(320, bits, 32)
