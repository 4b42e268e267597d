"""fp4 compared with its definition, number by number."""

import math
import textwrap

import pytest
import torch
from torch import Tensor

from commhooks.algorithms import Fp4
from commhooks.codecs import formats
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import E3M0, MXFP4, NVFP4

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
NUMBERS = {"mxfp4": E2M1, "nvfp4": E2M1, "e3m0": [0, 0.25, 0.5, 1, 2, 4, 8, 16]}
BLOCK = 128
GROUPS = {"mxfp4": 32, "nvfp4": 16}
FORMATS = {**GROUPS, "e3m0": BLOCK}


def nearest(ratios: Tensor, number_format: str) -> Tensor:
    """Return the nearest of the numbers; of two, the one with the even code."""
    numbers = torch.tensor(NUMBERS[number_format], dtype=torch.float64)
    distance = (ratios.abs()[..., None] - numbers).abs()
    is_odd = torch.arange(8) % 2
    nearest = (distance.min(-1, keepdim=True).values == distance) * (2 - is_odd)
    return numbers[nearest.argmax(-1)] * ratios.sign()


def quantize(x: Tensor, number_format: str) -> Tensor:
    """Quantize blocks in float64, as the formats are defined."""
    groups = x.double().unflatten(1, (-1, FORMATS[number_format]))
    largest = groups.abs().amax(2, keepdim=True)
    if number_format == "mxfp4":
        scale = torch.exp2(largest.clamp(min=1e-30).log2().floor() - 2)
    elif number_format == "e3m0":
        scale = largest / 16
    else:
        of_block = x.double().abs().amax(1)[:, None, None] / (6 * 448)
        scale = (largest / 6 / of_block).to(torch.float8_e4m3fn).double() * of_block
    ratios = torch.where(scale > 0, groups / scale.clamp(min=1e-300), 0.0)
    return (nearest(ratios, number_format) * scale).flatten(1)


def encode_and_decode(values: Tensor, number_format: str, block_size: int = BLOCK) -> Tensor:
    codec = BlockCodec(getattr(formats, number_format.upper()), block_size)
    message = torch.empty(1, codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, message, values.numel())
    decoded = torch.empty_like(values)
    codec.average(message, decoded, values.numel())
    return decoded


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("exponent", [1, 3, 9])
def test_decoded_numbers_are_those_of_the_format(number_format: str, exponent: int) -> None:
    """With heavy tails, some groups are so small beside others that their scale is 0."""
    generator = torch.Generator().manual_seed(exponent)
    rows = torch.randn(400, BLOCK, generator=generator) ** exponent
    expected = quantize(rows, number_format)
    found = encode_and_decode(rows.flatten(), number_format).view_as(rows).double()
    # Those near the middle of two numbers may become either, as float32 rounds more often.
    is_same = (found - expected).abs() <= 1e-5 * expected.abs()
    assert is_same.double().mean() > 0.9995
    distances = (found - rows).abs() - (expected - rows).abs()
    assert (distances.abs() <= 1e-5 * rows.abs().amax(1, keepdim=True))[~is_same].all()


def test_the_documented_algorithm_gives_the_decoded_numbers() -> None:
    names = {"torch": torch}
    exec(textwrap.dedent((Fp4.__doc__ or "").partition("::\n\n")[2].partition("\n\n")[0]), names)
    rows = torch.randn(20, 1024, generator=torch.Generator().manual_seed(0))
    found = encode_and_decode(rows.flatten(), "nvfp4", 1024).view_as(rows)
    expected = names["quantize"](rows)  # type: ignore[operator]
    is_same = (found - expected).abs() <= 1e-5 * expected.abs()
    assert is_same.double().mean() > 0.9995


@pytest.mark.parametrize(
    ("number_format", "of_middles"),
    [
        ("mxfp4", [0, 1, 1, 2, 2, 4, 4]),
        ("nvfp4", [0, 1, 1, 2, 2, 4, 4]),
        ("e3m0", [0, 0.5, 0.5, 2, 2, 8, 8]),
    ],
)
def test_each_code_and_each_tie(number_format: str, of_middles: list[float]) -> None:
    each = torch.tensor(NUMBERS[number_format])
    middles = (each[1:] + each[:-1]) / 2
    numbers = torch.cat([each.flip(0), middles, torch.zeros(1)])  # 16 of them
    values = torch.cat([numbers, -numbers] * (BLOCK // 32))
    values[-32:] = 0.0
    # So that the scale of the block is 1 in nvfp4 and e3m0, and those of groups are.
    values[-1] = 16.0 if number_format == "e3m0" else 6 * 448.0
    found = encode_and_decode(values, number_format).double()
    expected = nearest(values.double(), number_format)[:-32]
    assert torch.equal(found[:-32], expected)
    assert found[8:15].tolist() == of_middles


@pytest.mark.parametrize("number_format", FORMATS)
def test_numbers_next_to_a_tie_become_the_nearer_number(number_format: str) -> None:
    """Codes grow with the magnitude, so with the ties this determines them all."""
    each = torch.tensor(NUMBERS[number_format])
    lower, upper = each[:-1], each[1:]
    middles = (lower + upper) / 2
    below, above = middles.nextafter(lower), middles.nextafter(upper)
    magnitudes = torch.cat([below, above, each[-1:]])
    values = torch.zeros(BLOCK)
    values[:15], values[16:31] = magnitudes, -magnitudes
    # So that the scale of the block is 1 in nvfp4 and e3m0, and those of groups are.
    values[-1] = 16.0 if number_format == "e3m0" else 6 * 448.0
    found = encode_and_decode(values, number_format)
    expected = torch.cat([lower, upper, each[-1:]])
    assert torch.equal(found[:15], expected)
    assert torch.equal(found[16:31], -expected)


def test_mxfp4_has_powers_of_two_as_scales_and_clamps() -> None:
    values = torch.zeros(BLOCK)
    values[0], values[1], values[2] = 7.9, -6.5, 1.3
    values[32], values[64] = 2.0**-90, 3.0 * 2.0**-60
    found = encode_and_decode(values, "mxfp4")
    assert found[:3].tolist() == [6.0, -6.0, 1.5]
    assert found[32].item() == 2.0**-90
    assert found[64].item() == 3.0 * 2.0**-60


def test_lengths() -> None:
    mxfp4, nvfp4, e3m0 = BlockCodec(MXFP4, 1024), BlockCodec(NVFP4, 1024), BlockCodec(E3M0, 1024)
    assert e3m0.encoded_bytes(2000) == 2 * 4 + 1000
    assert mxfp4.encoded_bytes(2000) == 2 * 4 + 64 + 1000  # 63 groups
    assert nvfp4.encoded_bytes(2000) == 2 * 4 + 128 + 1000  # 125 groups
    assert nvfp4.encoded_bytes(1) == 4 + 4 + 4
    assert nvfp4.encoded_bytes(0) == 0


@pytest.mark.parametrize("number_format", GROUPS)
def test_blocks_without_a_scale(number_format: str) -> None:
    codec = BlockCodec(getattr(formats, number_format.upper()), BLOCK)
    values = torch.full((3 * BLOCK,), 2.0**-110)
    values[BLOCK:] = 1.0
    values[2 * BLOCK + 7] = math.inf
    before = values.clone()
    message = torch.full((1, codec.encoded_bytes(values.numel())), 0xAA, dtype=torch.uint8)
    codec.encode(values, message, values.numel(), keep_residual=True)
    groups = BLOCK // GROUPS[number_format]
    of_groups = message[0, 12 : 12 + 3 * groups].view(3, groups)
    assert not of_groups[::2].any()
    assert of_groups[1].all()
    decoded = torch.empty_like(values)
    codec.average(message, decoded, values.numel())
    assert not decoded[:BLOCK].any()
    assert decoded[2 * BLOCK :].isnan().all()
    assert torch.equal(values[:BLOCK], before[:BLOCK])
    assert torch.equal(
        values[BLOCK : 2 * BLOCK], before[BLOCK : 2 * BLOCK] - decoded[BLOCK:][:BLOCK]
    )


def test_errors_name_the_mistake() -> None:
    with pytest.raises(RuntimeError, match="multiple of 128 up to 4096, found 64"):
        BlockCodec(NVFP4, 64)
