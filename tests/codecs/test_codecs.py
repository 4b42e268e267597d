"""Codecs compared with NumPy in float64, on all kinds of numbers, lengths and alignments."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from commhooks.codecs import formats
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import E4M3, E5M2, NATURAL, signs

Array = NDArray[np.float64]

BLOCK = 64
# Larger magnitudes count as overflow, smaller ones as zeros. See commhooks/kernels/codecs/block.h.
LARGEST, SMALLEST = 2.0**126, 2.0**-100


@dataclass(frozen=True)
class Case:
    """A codec, and its definition in float64.

    ``scale`` takes the numbers of a block. ``step`` takes them in units of the scale, and returns
    the largest error of each decoded number in these units.
    """

    codec: BlockCodec
    bits: int
    value: Callable[[NDArray[np.uint8]], Array]
    scale: Callable[[Array], float]
    step: Callable[[Array], Array]


def integers(bits: int) -> Callable[[NDArray[np.uint8]], Array]:
    half = 2 ** (bits - 1)
    return lambda codes: (codes.astype(np.int64) ^ half).astype(np.float64) - half


def fp8_values(dtype: torch.dtype) -> Callable[[NDArray[np.uint8]], Array]:
    return lambda codes: torch.from_numpy(codes).view(dtype).double().numpy()


def powers(codes: NDArray[np.uint8]) -> Array:
    magnitude = (codes & 127).astype(np.float64)
    size = np.where(magnitude == 0, 0.0, 2.0 ** (magnitude - 127))
    return np.where(codes & 128, -size, size)


def largest(y: Array) -> float:
    return float(np.abs(y).max())


def root_mean(y: Array) -> float:
    return float(np.sqrt(np.mean(y**2)))


def power_above(y: Array) -> float:
    return 2.0 ** math.ceil(math.log2(largest(y)))


def half_a_mantissa(mantissa: int, smallest: float) -> Callable[[Array], Array]:
    """Return a function that gives half the distance between the neighboring fp8 numbers."""
    return lambda ratio: (
        np.maximum(2.0 ** (np.floor(np.log2(np.abs(ratio) + 1e-99)) - mantissa), smallest) / 2
    )


def level_case(
    bits: int, levels: int, *, norm: str = "max", clip: float = math.inf, stochastic: bool = False
) -> Case:
    lowest = -levels - (norm == "signed_max")

    def scale(y: Array) -> float:
        if norm == "signed_max":
            return largest(y) / (lowest if y.max() == largest(y) else -lowest)
        if norm == "l2":
            return float(np.sqrt(np.sum(y**2))) / levels
        return min(largest(y), clip * root_mean(y)) / levels

    def step(ratio: Array) -> Array:
        clipped = np.maximum(np.maximum(ratio - levels, lowest - ratio), 0)
        return clipped + (1.0 if stochastic else 0.5)

    codec = BlockCodec(
        formats.integers(bits, levels, norm=norm, clip=clip, stochastic=stochastic), BLOCK
    )
    return Case(codec, bits, integers(bits), scale, step)


CASES = {
    "int8": level_case(8, 127),
    "int8 stochastic": level_case(8, 127, stochastic=True),
    "int4": level_case(4, 7),
    "4 levels, l2": level_case(4, 4, norm="l2", stochastic=True),
    "int2": level_case(2, 1, norm="signed_max"),
    "8 levels, signed": level_case(4, 3, norm="signed_max"),
    "ternary": level_case(2, 1, stochastic=True),
    "ternary, clipped": level_case(2, 1, clip=1.5, stochastic=True),
    "e4m3": Case(BlockCodec(E4M3, BLOCK), 8, fp8_values(torch.float8_e4m3fn),
                 lambda y: largest(y) / 448, half_a_mantissa(3, 2.0**-9)),
    "e5m2": Case(BlockCodec(E5M2, BLOCK), 8, fp8_values(torch.float8_e5m2),
                 lambda y: largest(y) / 57344, half_a_mantissa(2, 2.0**-16)),
    "natural": Case(BlockCodec(NATURAL, BLOCK), 8, powers, power_above,
                    lambda ratio: np.maximum(np.abs(ratio), 2.0**-126)),
    "sign, mean": Case(BlockCodec(signs("mean"), BLOCK), 1, lambda codes: 1 - 2.0 * codes,
                       lambda y: float(np.mean(np.abs(y))), lambda ratio: abs(np.abs(ratio) - 1)),
    "sign, root mean": Case(BlockCodec(signs("root_mean"), BLOCK), 1,
                            lambda codes: 1 - 2.0 * codes, root_mean,
                            lambda ratio: abs(np.abs(ratio) - 1)),
}  # fmt: skip


def encode(case: Case, values: Tensor, error: Tensor | None = None, seed: int = 1) -> Tensor:
    message = torch.full((case.codec.encoded_bytes(values.numel()),), 0xAA, dtype=torch.uint8)
    case.codec.encode(values, message[None], values.numel(), error=error, seed=seed)
    return message


def decode(case: Case, message: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.empty(numel, dtype=dtype)
    case.codec.average(message[None], values, numel)
    return values


def split(case: Case, message: Tensor, numel: int) -> tuple[Array, NDArray[np.uint8]]:
    """Return the scales and the codes of a message."""
    blocks = -(-numel // BLOCK)
    memory = message.numpy()
    scales = memory[: 4 * blocks].copy().view(np.float32).astype(np.float64)
    code_bytes = -(-numel * case.bits // 8)
    in_bits = np.unpackbits(memory[4 * blocks : 4 * blocks + code_bytes], bitorder="little")
    codes = np.packbits(in_bits[: numel * case.bits].reshape(-1, case.bits), axis=1,
                        bitorder="little")  # fmt: skip
    assert not memory[4 * blocks + code_bytes :].any()
    return scales, codes.reshape(-1)


def blocks_of(y: Array) -> Iterator[slice]:
    for start in range(0, len(y), BLOCK):
        yield slice(start, min(start + BLOCK, len(y)))


# --------------------------------------------------------------------------- all kinds of numbers

numbers = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-130), 2.0**-101, 1e-20, 2.0**126, 3.4e38]),
)
not_finite = st.sampled_from([math.inf, -math.inf, math.nan])


@st.composite
def arrays(draw: Callable[..., object]) -> list[float]:
    """Draw a list of any length with few distinct numbers, which keeps hypothesis fast."""
    length = draw(st.integers(0, 3 * BLOCK + 5))
    few = draw(st.lists(numbers, min_size=1, max_size=20))
    values = [few[(7 * i) % len(few)] for i in range(length)]
    if length and draw(st.integers(0, 3)) == 0:
        values[draw(st.integers(0, length - 1))] = draw(not_finite)
    return values


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60)
@given(drawn=arrays(), offset=st.integers(0, 5), byte_offset=st.integers(0, 5))
def test_messages_match_numpy(name, drawn, offset, byte_offset):
    case, numel = CASES[name], len(drawn)
    memory = torch.full((numel + 8,), 7.0)
    values = memory[offset : offset + numel]
    values.copy_(torch.tensor(drawn))
    room = torch.full((case.codec.encoded_bytes(numel) + 8,), 0xAA, dtype=torch.uint8)
    message = room[byte_offset : byte_offset + case.codec.encoded_bytes(numel)]
    case.codec.encode(values, message[None], numel, seed=3)

    y = values.double().numpy()
    scales, codes = split(case, message.clone(), numel)
    decoded = decode(case, message, numel).double().numpy()
    for block, scale in zip(blocks_of(y), scales, strict=True):
        if not np.abs(y[block]).max() <= LARGEST:
            assert np.isnan(scale)
            assert np.isnan(decoded[block]).all()
            continue
        if np.abs(y[block]).max() < SMALLEST:
            assert scale == 0
            assert not decoded[block].any()
            continue
        expected = case.scale(y[block])
        if expected * 2**7 > 3.4e38:  # a norm may overflow float32 although no number does
            continue
        assert scale == pytest.approx(expected, rel=2.0**-20)  # sums are in float32
        value = case.value(codes[block])
        assert np.array_equal(decoded[block], (value * scale).astype(np.float32))
        ratio = y[block] / scale
        # The ratio is rounded twice, because the inverse of the scale is rounded.
        slack = 2.0**-22 * (1 + np.abs(ratio))
        assert (np.abs(value - ratio) <= case.step(ratio) + slack).all()
    assert torch.equal(values.view(torch.int32), torch.tensor(drawn).float().view(torch.int32))
    untouched = torch.cat([memory[:offset], memory[offset + numel :]])
    assert (untouched == 7).all()
    assert (room[:byte_offset] == 0xAA).all()
    assert (room[byte_offset + len(message) :] == 0xAA).all()
    is_finite = bool(np.isfinite(scales).all())
    assembled = torch.zeros(numel)
    assert case.codec.assemble(message[None].clone(), assembled, numel).item() == is_finite
    assert assembled.isnan().all() != is_finite or numel == 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_decoded_plus_residual_is_value_plus_error(name, dtype, numel):
    case = CASES[name]
    generator = torch.Generator().manual_seed(numel)
    given_values, error = (
        torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)
    )
    error[: numel // 3] *= 1e-3
    kept_error = error.clone()
    values = given_values.clone()
    message = torch.empty(case.codec.encoded_bytes(numel), dtype=torch.uint8)
    case.codec.encode(values, message[None], numel, error=error, seed=5, keep_residual=True)
    sent = decode(case, message, numel).to(dtype)
    wanted = given_values.double() + kept_error.double()
    # The sum and the difference are rounded; values are below 8, decoded numbers below 32.
    tolerance = 2 * 40 * torch.finfo(dtype).eps
    assert torch.equal(error, kept_error)
    assert ((sent.double() + values.double()) - wanted).abs().le(tolerance).all()
    same = torch.empty_like(message)
    case.codec.encode(given_values, same[None], numel, error=error, seed=5)
    assert torch.equal(message, same)  # keeping the residual does not change the message


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_two_bits_change_no_number_by_more_than_itself(sign):
    """The number of the largest magnitude is exact; of two with both signs, the positive one."""
    values = sign * torch.randn(200 * BLOCK, generator=torch.Generator().manual_seed(0)) ** 3
    values[1], values[40] = 90.0 * sign, -90.0 * sign
    decoded = decode(CASES["int2"], encode(CASES["int2"], values), values.numel())
    assert ((decoded - values).abs() <= values.abs()).all()
    rows, decoded_rows = values.view(-1, BLOCK), decoded.view(-1, BLOCK)
    at = rows.abs().argmax(1, keepdim=True)
    assert torch.equal(decoded_rows.gather(1, at)[1:], rows.gather(1, at)[1:])
    assert decoded[values == 90.0].item() == 90.0
    assert decoded[values == -90.0].item() == -45.0


@pytest.mark.parametrize("name", CASES)
def test_blocks_without_a_scale_stay_in_the_residual(name):
    case = CASES[name]
    values = torch.full((2 * BLOCK,), 1e-35)
    values[BLOCK:] = 1.0
    before = values.clone()
    message = torch.empty(case.codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    case.codec.encode(values, message[None], values.numel(), keep_residual=True)
    assert torch.equal(values[:BLOCK], before[:BLOCK])


def test_fp8_rounds_as_torch_does():
    """Test every 509th bit pattern of float32 that is in range; 509 is prime."""
    bits = torch.arange(-(2**31), 2**31, 509, dtype=torch.int64).to(torch.int32)
    for number_format, dtype, top in (
        ("e4m3", torch.float8_e4m3fn, 448.0),
        ("e5m2", torch.float8_e5m2, 57344.0),
    ):
        numbers = bits.view(torch.float32)
        numbers = numbers[numbers.abs() <= top]
        rows = numbers[: numbers.numel() // 31 * 31].view(-1, 31)
        # The largest number of each block is that of the format, so the scale is 1.
        rows = torch.cat([torch.full((len(rows), 1), top), rows], 1)
        values = rows.reshape(-1)
        codec = BlockCodec(getattr(formats, number_format.upper()), 32)
        message = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
        codec.encode(values, message[None], values.numel())
        scales, codes = message[: len(rows) * 4], message[len(rows) * 4 :]
        assert (scales.view(torch.float32) == 1).all()
        assert torch.equal(codes, values.to(dtype).view(torch.uint8))


@pytest.mark.parametrize(
    ("number_format", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_fp8_decodes_every_finite_code_as_torch_does(number_format, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(dtype).float().isfinite()]
    scale = torch.ones(8).view(torch.uint8)  # of 32 elements each
    message = torch.cat([scale[: 4 * -(-len(codes) // 32)], codes])
    message = torch.nn.functional.pad(message, (0, -len(message) % 4))
    values = torch.empty(len(codes))
    BlockCodec(getattr(formats, number_format.upper()), 32).average(
        message[None], values, len(codes)
    )
    assert torch.equal(values.view(torch.int32), codes.view(dtype).float().view(torch.int32))


# ------------------------------------------------------------------------------ stochastic rounding

SEEDS = 4000
STOCHASTIC = ["int8 stochastic", "4 levels, l2", "ternary", "natural"]


@pytest.mark.parametrize("name", STOCHASTIC)
def test_mean_over_seeds_is_the_number(name):
    """By Hoeffding, a mean of K numbers of range w errs by √(ln(2/δ)/2K)·w with probability δ."""
    case = CASES[name]
    values = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(0))
    values[5] = 0.0
    messages = torch.stack([encode(case, values, seed=seed * 977) for seed in range(SEEDS)])
    decoded = torch.stack([decode(case, m, values.numel()) for m in messages]).double()
    scales, _ = split(case, messages[0], values.numel())
    scale = torch.tensor(scales).repeat_interleave(BLOCK)
    width = values.double().abs() if name == "natural" else scale
    chance = 1e-9 / values.numel()
    bound = width * math.sqrt(math.log(2 / chance) / (2 * SEEDS)) + scale * 2.0**-20
    assert ((decoded.mean(0) - values).abs() <= bound).all()
    spread = decoded.std(0)
    assert (spread[values.abs() > 0] > 0).sum() > values.numel() / 2  # rounding is random


@pytest.mark.parametrize("name", STOCHASTIC)
def test_neighbors_are_rounded_independently(name):
    """A third of the numbers at a third of the way between two codes is rounded up."""
    case = CASES[name]
    numel = 200 * BLOCK
    values = torch.full((numel,), 4 / 3 if name == "natural" else 1 / 3)
    if name == "natural":
        values /= 2
        low, high = 0.5, 1.0
    elif name == "4 levels, l2":  # norm √(63/9 + 1)
        low, high = 0.0, math.sqrt((BLOCK - 1) / 9 + 1) / 4
    else:
        low, high = (42 / 127, 43 / 127) if name == "int8 stochastic" else (0.0, 1.0)
    values[::BLOCK] = 1.0  # makes the scale known
    decoded = decode(case, encode(case, values, seed=11), numel).view(-1, BLOCK)[:, 1:]
    is_up = decoded > (low + high) / 2
    share = (values[1].item() - low) / (high - low)
    for flips in (is_up, is_up[:, 1:] ^ is_up[:, :-1], is_up[1:] ^ is_up[:-1]):
        expected = share if flips is is_up else 2 * share * (1 - share)
        deviation = math.sqrt(expected * (1 - expected) / flips.numel())
        # Within 6 deviations. Pairs share numbers with the next pair, which at most doubles them.
        assert abs(flips.double().mean().item() - expected) < 12 * deviation


def test_signs_of_zeros_are_fair():
    case = CASES["sign, mean"]
    values = torch.zeros(BLOCK)
    values[0] = BLOCK
    decoded = torch.stack(
        [decode(case, encode(case, values, seed=s * 2654435761), BLOCK) for s in range(SEEDS)]
    )
    assert (decoded[:, 0] == 1).all()
    bound = 2 * math.sqrt(math.log(2e9 * BLOCK) / (2 * SEEDS))
    assert (decoded[:, 1:].double().mean(0).abs() <= bound).all()


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_number_of_threads(name):
    case = CASES[name]
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            message = encode(case, values)
            found.append((message, decode(case, message, values.numel())))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


# ------------------------------------------------------------------------------- several messages


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_average_is_the_mean(name, count, dtype):
    case, numel = CASES[name], 200
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, numel, generator=generator)
    messages = torch.stack([encode(case, row, seed=i) for i, row in enumerate(values)])
    alone = torch.stack([decode(case, message, numel) for message in messages]).double()
    result = torch.arange(numel, dtype=dtype)
    case.codec.average(messages, result, numel)
    tolerance = 2 * count * torch.finfo(torch.float32).eps * alone.abs().sum(0)
    assert ((result.double() - alone.mean(0)).abs() <= tolerance).all()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_majority_of_signs(count):
    codec = BlockCodec(signs("mean", majority=True), BLOCK)
    case = Case(codec, 1, *(lambda x: x,) * 3)
    values = torch.randn(count, 3 * BLOCK, generator=torch.Generator().manual_seed(count))
    values[0, BLOCK : 2 * BLOCK] = 0  # does not vote in this block
    messages = torch.stack([encode(case, row) for row in values])
    result = torch.empty(3 * BLOCK)
    codec.average(messages, result, 3 * BLOCK)
    for block in range(3):
        part = values[:, block * BLOCK : (block + 1) * BLOCK].double()
        expected = part.sign().sum(0).sign() * part.abs().mean(1).mean()
        found = result[block * BLOCK : (block + 1) * BLOCK].double()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_one_message_that_is_not_finite_gives_nan(name):
    case = CASES[name]
    values = torch.ones(3, 2 * BLOCK)
    values[1, 3] = -math.inf
    messages = torch.stack([encode(case, row) for row in values])
    result = torch.empty(2 * BLOCK)
    case.codec.average(messages, result, 2 * BLOCK)
    assert result[:BLOCK].isnan().all()
    assert result[BLOCK:].isfinite().all()


# ------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("numel", "length"), [(200, 100), (300, 100), (201, 100), (130, 64), (5, 9)]
)
def test_parts_are_encoded_separately(name, dtype, numel, length):
    """Encode three parts; the last ones may be short or empty."""
    codec = CASES[name].codec
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    messages = torch.full((3, codec.encoded_bytes(length)), 0xAA, dtype=torch.uint8)
    codec.encode(values, messages, length, seed=2)
    assembled = torch.full((numel,), 7, dtype=dtype)
    kept = torch.zeros_like(assembled)
    assert codec.assemble(messages, assembled, length, kept=kept).tolist() == [True]
    assert (kept == 7).all()
    for part, message in zip(values.split(length), messages, strict=False):
        if (
            name not in STOCHASTIC and name != "ternary, clipped"
        ):  # random numbers depend on the position
            alone = torch.empty_like(message)
            codec.encode(part, alone[None], length, seed=2)
            assert torch.equal(message, alone)
    for index, part in enumerate(assembled.split(length)):
        alone = torch.empty_like(part)
        codec.average(messages[index : index + 1], alone, length)
        assert torch.equal(part, alone)
    if numel <= 2 * length:
        assert not messages[2].any()


@pytest.mark.parametrize("name", CASES)
def test_one_part_that_is_not_finite_gives_nan_and_does_not_change_kept(name):
    codec = CASES[name].codec
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 3] = -math.inf
    messages = torch.empty(3, codec.encoded_bytes(BLOCK), dtype=torch.uint8)
    codec.encode(values, messages, BLOCK)
    result, kept = torch.ones(3 * BLOCK), torch.full((3 * BLOCK,), 5.0)
    assert codec.assemble(messages, result, BLOCK, kept=kept).tolist() == [False]
    assert result.isnan().all()
    assert (kept == 5).all()


# ---------------------------------------------------------------------------------- lengths, errors


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (BlockCodec(formats.integers(8), 256), 4 * 4 + 1000),
        (BlockCodec(formats.integers(4), 128), 8 * 4 + 500),
        (BlockCodec(formats.integers(2, norm="signed_max"), 512), 2 * 4 + 252),
        (BlockCodec(signs("mean"), 1024), 4 + 128),
        (BlockCodec(NATURAL, 512), 2 * 4 + 1000),
        (BlockCodec(E5M2, 4096), 4 + 1000),
    ],
)
def test_lengths(codec, expected):
    assert codec.encoded_bytes(1000) == expected
    assert codec.encoded_bytes(0) == 0


def test_errors_name_the_mistake():
    codec = BlockCodec(formats.integers(8), 32)
    room = torch.empty(1, 8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"float32 or float64, found .* torch.float16"):
        codec.encode(torch.ones(3, dtype=torch.float16), room, 3)
    with pytest.raises(
        RuntimeError, match=r"flat and contiguous, in float32 or float64, found shape \(2, 2\)"
    ):
        codec.encode(torch.ones(2, 2), room, 4)
    with pytest.raises(RuntimeError, match=r"contiguous rows of 108 bytes for 96 of"):
        codec.encode(torch.ones(96), room, 96)
    with pytest.raises(RuntimeError, match=r"rows of 8 bytes for 3 of the 4 values each"):
        codec.encode(torch.ones(4), room, 3)
    with pytest.raises(RuntimeError, match=r"errors like the numbers, \(3,\)"):
        codec.encode(torch.ones(3), room, 3, error=torch.ones(4))
    with pytest.raises(RuntimeError, match=r"messages of uint8 on cpu, in contiguous rows of 8"):
        codec.average(room[0], torch.ones(3), 3)
    with pytest.raises(RuntimeError, match=r"one part of at most 2 values, found 2 messages"):
        codec.average(torch.empty(2, 8, dtype=torch.uint8), torch.ones(4), 2)
    with pytest.raises(RuntimeError, match=r"multiple of 32 up to 4096, found 33"):
        BlockCodec(formats.integers(8), 33)
    with pytest.raises(ValueError, match=r"1 to 7 levels in 4 bits, found 8"):
        BlockCodec(formats.integers(4, 8), 32)
