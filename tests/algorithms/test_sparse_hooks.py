"""All sparse hooks: nothing is lost, all ranks agree, and the bytes sent are as documented."""

import copy
import functools
import importlib
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lockstep import RecordingCommunicator, lockstep, make_bucket
from torch import Tensor

import commhooks
from commhooks import CommHook, CommHookOptionError
from commhooks.algorithms.sparse.dgc import DGC
from commhooks.algorithms.sparse.randomk import RandomK
from commhooks.algorithms.sparse.selection import draw_indices
from commhooks.algorithms.sparse.shared_topk import SharedTopK
from commhooks.algorithms.sparse.threshold import Threshold
from commhooks.algorithms.sparse.topk import TopK
from commhooks.comm.wire import all_gather_bytes, all_reduce_bytes
from commhooks.hook.spec import hook_spec
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

# The options make each hook leave some elements out.
HOOKS: dict[str, Callable[[], CommHook]] = {
    "topk": functools.partial(TopK, density=0.1, warmup_steps=2),
    "topk, dense": functools.partial(TopK, density=0.6, warmup_steps=0),
    "topk, chunks": functools.partial(TopK, density=0.1, warmup_steps=2, chunk=100),
    "topk, quantized": functools.partial(TopK, density=0.1, warmup_steps=2, chunk=320, bits=8),
    "shared_topk": functools.partial(SharedTopK, density=0.1, warmup_steps=2),
    "shared_topk, dense": functools.partial(SharedTopK, density=0.6, warmup_steps=0),
    "threshold": functools.partial(Threshold, value=1.5),
    "threshold, dense": functools.partial(Threshold, value=0.3),
    "randomk": functools.partial(RandomK, density=0.2, error_feedback=True),
    "dgc": functools.partial(DGC, density=0.1, warmup_steps=2),
}
WITHOUT_ERROR: dict[str, Callable[[], CommHook]] = {
    "topk": functools.partial(TopK, density=0.1, warmup_steps=0, error_feedback=False),
    "topk, chunks": functools.partial(
        TopK, density=0.1, warmup_steps=0, chunk=2000, error_feedback=False
    ),
    "threshold": functools.partial(Threshold, value=1.5, error_feedback=False),
}


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    return draw_gradients(zeros, 7, rank, step)


def flat(named: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.cat([named[name].reshape(-1).to(dtype) for name in SHAPES])


def memory(hook: CommHook, field: str = "error") -> Tensor:
    """Return all of the hook's errors, (NUMEL,) float64; zeros before its first step."""
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return flat({name: hook.state.get(name, {}).get(field, zero[name]) for name in SHAPES})


def take_step(
    hooks: list[CommHook], step: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[RecordingCommunicator]]:
    buckets = [make_bucket(gradients_of(rank, step, dtype), step) for rank in range(len(hooks))]
    return lockstep(hooks, buckets, wants_contribution=True)


def assert_is_mean(results: list[Tensor], of: list[Tensor]) -> None:
    """Allow one rounding per rank and one of the result."""
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].count_nonzero() > 0
    unit = torch.finfo(results[0].dtype).eps * len(of)
    mean = torch.stack(of).mean(0)
    torch.testing.assert_close(results[0].double(), mean, rtol=unit, atol=unit)


# ------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [name for name in HOOKS if name != "dgc"])
def test_sent_plus_error_is_gradient_plus_old_error(name, size, dtype):
    """The result is the mean of the sent vectors, whose elements are zero or those of the sum."""
    hooks = [HOOKS[name]() for _ in range(size)]
    unit = torch.finfo(dtype).eps if "quantized" not in name else 1.0
    for step in range(4):
        old = [memory(hook) for hook in hooks]
        results, comms = take_step(hooks, step, dtype)
        sent = []
        for rank, hook in enumerate(hooks):
            # Gradient and old error are added once, in the precision of the error.
            memory_dtype = torch.promote_types(dtype, torch.float32)
            gradient = flat(gradients_of(rank, step, dtype), memory_dtype)
            total = (gradient + old[rank].to(memory_dtype)).double()
            sent.append(total - memory(hook))
            rounded = (sent[-1] - total).abs() <= unit * total.abs()
            assert torch.all((sent[-1] == 0) | rounded)
            if comms[rank].contribution is not None:
                assert torch.equal(comms[rank].contribution.double(), sent[-1])
        assert_is_mean(results, sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["topk, dense", "threshold, dense", "topk, chunks"])
@pytest.mark.parametrize("size", [2, 8])
def test_no_step_sends_more_than_an_average_in_float32(name, size, dtype):
    """Not in warm-ups, and not with many ranks, see Note [Many elements]."""
    hooks = [HOOKS[name]() for _ in range(size)]
    most = all_reduce_bytes(4 * NUMEL, size)
    for step in range(4):
        _, comms = take_step(hooks, step, dtype)
        tensor = comms[0].sent[-1]
        is_summed = tensor.shape == (NUMEL,)
        assert is_summed or all_gather_bytes(tensor.nbytes, size) <= most
        bucket = make_bucket(gradients_of(0, step, dtype), step)
        if name != "threshold, dense":
            sent = most if is_summed else all_gather_bytes(tensor.nbytes, size)
            assert hooks[0].wire_bytes(bucket, size) == sent
        if size == 8 and (step == 0 or "dense" in name):
            assert is_summed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITHOUT_ERROR)
def test_without_error_feedback_some_of_the_gradient_is_sent(name, dtype):
    hooks = [WITHOUT_ERROR[name]() for _ in range(3)]
    results, comms = take_step(hooks, 0, dtype)
    sent = []
    for rank, (hook, comm) in enumerate(zip(hooks, comms, strict=True)):
        gradient = flat(gradients_of(rank, 0, dtype))
        sent.append(comm.contribution.double())
        assert torch.all((sent[-1] == 0) | (sent[-1] == gradient))
        smallest = sent[-1][sent[-1] != 0].abs().min()
        assert torch.all((sent[-1] != 0) | (gradient.abs() <= smallest))
        assert hook.state == {}
    assert_is_mean(results, sent)


@pytest.mark.parametrize("name", HOOKS)
def test_excess_over_the_range_of_float16_remains_to_be_sent(name):
    """Otherwise infinity would be sent in every step."""
    hooks = [HOOKS[name]() for _ in range(3)]
    take_step(hooks, 0, torch.float16)
    for hook in hooks:
        for field in hook.state["matrix"]:
            hook.state["matrix"][field].fill_(200_000)
    results, _ = take_step(hooks, 1, torch.float16)
    assert results[0].isfinite().all()
    assert results[0].max() >= 65504 / 2
    rest = memory(hooks[0])[1:392]
    assert rest.isfinite().all()
    assert rest.min() > 100_000


@pytest.mark.parametrize("name", [*HOOKS, "randomk, unbiased"])
def test_empty_bucket(name):
    made = HOOKS.get(name, functools.partial(RandomK, error_feedback=False))
    (result,), _ = lockstep([made()], [make_bucket({"empty": torch.zeros(0, 5)})])
    assert result.shape == (0,)


# ------------------------------------------------------------------ the documented algorithms


def run_documented(module: str, names: dict[str, Any]) -> None:
    """Run the algorithm that opens the file of a hook, with ``names`` as its variables."""
    document = importlib.import_module(f"commhooks.algorithms.sparse.{module}").__doc__
    assert document is not None
    exec(textwrap.dedent(document.partition("::\n\n")[2].partition("\n\n")[0]), names)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("module", "hook", "constants", "fields"),
    [
        ("topk", TopK(density=0.1, warmup_steps=0), {}, {"e": "error"}),
        ("threshold", Threshold(value=0.8), {"value": 0.8}, {"e": "error"}),
        ("randomk", RandomK(density=0.1, error_feedback=True), {}, {"e": "error"}),
        (
            "dgc",
            DGC(density=0.1, warmup_steps=0, momentum=0.75, clip=9.0),
            {"m": 0.75, "clip": 9.0, "sqrt": math.sqrt},
            {"u": "velocity", "v": "error"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_documented_algorithm_gives_the_results_and_the_state(
    module, hook, constants, fields, size, monkeypatch
):
    n, k = 400, 40
    names = {"torch": torch, "N": size, "n": n, "k": k, **constants}
    names |= {name: [torch.zeros(n) for _ in range(size)] for name in fields}
    hooks = [copy.deepcopy(hook) for _ in range(size)]
    generator = torch.Generator().manual_seed(size)
    for step in range(4):
        gradients = [torch.randn(n, generator=generator) for _ in range(size)]
        results, comms = lockstep(hooks, [make_bucket({"p": g.clone()}, step) for g in gradients])
        seed = comms[0].generator.initial_seed()
        drawn = draw_indices(n, k, torch.Generator().manual_seed(seed), like=torch.empty(0))
        names |= {"g": gradients, "sent": [torch.empty(0)] * size}
        with monkeypatch.context() as patched:
            patched.setattr(torch, "randperm", lambda _, drawn=drawn: drawn.long())
            run_documented(module, names)
        torch.testing.assert_close(results[0], names["result"], rtol=1e-5, atol=1e-6)
        for name, field in fields.items():
            for expected, own in zip(names[name], hooks, strict=True):
                torch.testing.assert_close(own.state["p"][field], expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------- non-finite numbers


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("name", HOOKS)
def test_non_finite_numbers_do_not_change_the_state(name, bad_rank, bad):
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


# -------------------------------------------------------------------------------- on the wire


def message_bytes(numel: int, count: int, itemsize: int) -> int:
    """Return the size of the values and of the shortest code, computed independently."""

    def words(bits: int) -> int:
        return 8 * ((bits + 63) // 64)

    shortest = words(numel)
    for low in range(31):
        shortest = min(shortest, words(((numel - 1) >> low) + count) + words(low * count))
    return count * itemsize + shortest


@pytest.mark.parametrize("density", [1e-6, 0.01, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_a_fixed_share(dtype, density):
    bucket = make_bucket(gradients_of(0, 0, dtype), step=1)
    count = max(1, round(density * NUMEL))
    for hook, expected_bytes in [
        (TopK(density=density, warmup_steps=0), message_bytes(NUMEL, count, dtype.itemsize)),
        (DGC(density=density, warmup_steps=0), message_bytes(NUMEL, count, dtype.itemsize)),
        (RandomK(density=density), count * dtype.itemsize),
    ]:
        _, (comm,) = lockstep([hook], [bucket])
        assert [tensor.nbytes for tensor in comm.sent] == [expected_bytes], hook


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("numel", [4096, 10 * 4096 + 1000, 10 * 4096 + 7])
def test_bits_per_parameter_of_chunks(numel, bits):
    """The formula in docs/hooks/topk.md: 8 bits per index, `bits` per value, 32 per chunk."""
    chunks, rest = divmod(numel, 4096)
    count = 64 * chunks + min(64, rest)
    hook = TopK(density=1 / 64, warmup_steps=0, chunk=4096, bits=bits)
    bucket = make_bucket({"p": torch.randn(numel)})
    _, (comm,) = lockstep([hook], [bucket])
    index_bytes = message_bytes(numel, count, 0)
    value_bytes = 4 * math.ceil(count / 64) + 4 * math.ceil(count * bits / 32)
    assert [tensor.nbytes for tensor in comm.sent] == [index_bytes + value_bytes]
    assert hook.wire_bytes(bucket, 9) == 8 * (index_bytes + value_bytes)
    if rest == 0:
        assert 8 * (index_bytes + value_bytes) == 64 * (8 + bits) + 32


def test_recipe_of_sparseloco():
    """As docs/hooks/topk.md has it: 64 of 4096 in 2 bits, 0.164 bits per parameter."""
    page = (Path(__file__).parents[2] / "docs/hooks/topk.md").read_text()
    (recipe,) = re.findall(r"^ +(error_feedback:.*)$", page, re.M)
    hook = commhooks.create(hook_spec(recipe).config)
    gradient = torch.randn(100 * 4096)
    (result,), _ = lockstep([hook.inner], [make_bucket({"p": gradient.clone()})])
    assert [int(chunk.count_nonzero()) for chunk in result.split(4096)] == [64] * 100
    bits = 8 * hook.wire_bytes(make_bucket({"p": gradient}), 2) / gradient.numel()
    assert bits == pytest.approx((64 * (8 + 2) + 32) / 4096, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contribution_and_error_are_those_of_the_quantized_values(dtype):
    options = {"density": 0.1, "warmup_steps": 0, "chunk": 320, "bits": 2}
    keeps, tells = TopK(**options), TopK(**options, error_feedback=False)
    gradient = gradients_of(0, 0, dtype)
    (result,), _ = lockstep([keeps], [make_bucket(gradient)])
    _, (comm,) = lockstep([tells], [make_bucket(gradient)], wants_contribution=True)
    assert comm.contribution is not None
    assert torch.equal(comm.contribution.to(dtype), result)
    exact = torch.promote_types(dtype, torch.float32)
    assert torch.equal(flat(gradient, exact) - comm.contribution, memory(keeps).to(exact))
    sent = comm.contribution[comm.contribution != 0]
    assert len(sent.unique()) < len(sent)  # a few levels for each chunk
    for chunk, found in zip(flat(gradient).split(320), comm.contribution.split(320), strict=True):
        largest = chunk.abs().argmax()  # it arrives unchanged, as in int2
        assert found[largest].item() == pytest.approx(chunk[largest].item())


@pytest.mark.parametrize("dtype", DTYPES)
def test_threshold_pads_to_the_largest_count(dtype):
    hooks = [Threshold(value=1.0) for _ in range(3)]
    buckets = [make_bucket(gradients_of(rank, 0, dtype)) for rank in range(3)]
    buckets[2].buffer().mul_(2)
    counts = [int((bucket.buffer().abs() >= 1).sum()) for bucket in buckets]
    assert counts[0] < counts[2]
    _, comms = lockstep(hooks, buckets)
    for comm in comms:
        sent = [tensor.nbytes for tensor in comm.sent]
        assert sent == [8, message_bytes(NUMEL, max(counts), dtype.itemsize)]


def test_threshold_sends_only_counts_if_nothing_reaches_it():
    hook = Threshold(value=1e9)
    (result,), (comm,) = take_step([hook], 0)
    assert torch.equal(result, torch.zeros(NUMEL))
    assert torch.equal(memory(hook), flat(gradients_of(0, 0)))
    assert [tensor.nbytes for tensor in comm.sent] == [8]


def bytes_on_the_engine(rank: int, size: int, hook: CommHook) -> tuple[float | None, int | None]:
    """Return the bytes counted in a step, and those of the hook's formula."""
    parameters = probe_parameters()
    trainer = Trainer(hook, parameters, bucket_cap_mb=25, stable_buckets=True)
    for step in range(2):
        trainer.step(draw_gradients(parameters, rank, step))
    bucket = make_bucket(parameters, step=1)
    return trainer.handle.stats().total.wire_bytes, hook.wire_bytes(bucket, size)


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_counted_on_the_engine(run_ranks, size):
    numel = sum(tensor.numel() for tensor in probe_parameters().values())
    count = round(0.05 * numel)
    gathered = (size - 1) * message_bytes(numel, count, 4)
    reduced = 2 * (size - 1) * math.ceil(4 * count / size)
    for hook, expected in [
        (TopK(density=0.05, warmup_steps=0), gathered),
        (DGC(density=0.05, warmup_steps=0), gathered),
        (RandomK(density=0.05), reduced),
    ]:
        for found, formula in run_ranks(bytes_on_the_engine, size, hook):
            assert found == formula == expected, hook


# ------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("topk", {"density": 0.0}, "density.*> 0.*found 0.0"),
        ("topk", {"density": 1.5}, "density.*<= 1.*found 1.5"),
        ("topk", {"density": math.nan}, "density.*found nan"),
        ("topk", {"bits": 4}, "'bits' of hook 'topk': expected 'chunk' beside it"),
        ("topk", {"chunk": 0}, "chunk.*found 0.*>= 1"),
        ("topk", {"chunk": 64, "bits": 3}, "bits.*found 3"),
        ("threshold", {"value": 0.0}, "value.*> 0.*found 0.0"),
        ("threshold", {"value": math.inf}, "value.*< inf.*found inf"),
        ("randomk", {"density": -0.1}, "density.*> 0.*found -0.1"),
        ("dgc", {"momentum": 1.0}, "momentum.*< 1.*found 1.0"),
        ("dgc", {"clip": 0.0}, "clip.*found 0.0"),
        ("dgc", {"warmup_steps": -1}, "warmup_steps.*>= 0.*found -1"),
    ],
)
def test_options_out_of_range(name, options, message):
    with pytest.raises(CommHookOptionError, match=message):
        commhooks.create(name, **options)
