"""Loops give the same bits for every instruction set that they are compiled for."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_runs import CODECS, numbers, run
from support.instruction_sets import instruction_sets, use_instruction_set
from torch import Tensor

from commhooks.codecs import formats
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import signs
from commhooks.native import select_largest, select_largest_of_chunks
from commhooks.testing.compare import same_bits
from reducer.native import pack, unpack

PLAIN, *WIDER = instruction_sets()
KINDS = ("usual", "any size", "tiny", "zeros", "not finite")


@pytest.fixture(autouse=True)
def widest_again() -> Iterator[None]:
    yield
    use_instruction_set(instruction_sets()[-1])


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return whether all bits are equal; all NaNs count as equal."""
    if not one.is_floating_point():
        return same_bits(one, other)
    nans = one.isnan()
    return torch.equal(nans, other.isnan()) and same_bits(one[~nans], other[~nans])


def test_every_machine_has_the_plain_set_and_other_names_raise():
    assert PLAIN == "plain"
    with pytest.raises(RuntimeError, match=r"an instruction set that this CPU supports, .*plain.*"):
        use_instruction_set("abacus")


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=30)
@given(
    block=st.sampled_from([32, 64, 96, 128, 256, 512, 544, 1024, 4096]),
    blocks=st.integers(0, 40),
    more=st.integers(-70, 70),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    with_error=st.booleans(),
    parts=st.integers(1, 4),
    offset=st.integers(0, 17),
)
def test_codecs(name, block, blocks, more, kind, dtype, with_error, parts, offset):
    codec = CODECS[name](block)
    values = numbers(max(0, min(blocks * block, 9000) + more), kind, dtype)
    error = numbers(values.numel(), "usual", dtype) * 1e-2 if with_error else None

    def on(instruction_set: str) -> list[Tensor]:
        use_instruction_set(instruction_set)
        return list(run(codec, values, error, parts, offset, "cpu"))

    expected = on(PLAIN)
    for wider in WIDER:
        for index, (one, other) in enumerate(zip(on(wider), expected, strict=True)):
            assert same_numbers(one, other), f"tensor {index} on {wider}"


@pytest.mark.parametrize(
    ("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_every_code_of_fp8(name, dtype):
    """Codes of infinity and NaN, which are never sent, are decoded to larger numbers."""
    codes = torch.arange(256, dtype=torch.uint8)
    scale = torch.tensor([3.0]).view(torch.uint8)
    message = torch.cat([scale, scale, codes, codes.flip(0)])[None]
    found = []
    for instruction_set in instruction_sets():
        use_instruction_set(instruction_set)
        found.append(torch.full((512,), 7.0))
        BlockCodec(getattr(formats, name.upper()), 256).average(message, found[-1], 512)
    for values in found[1:]:
        assert same_bits(values, found[0])
    expected = 3 * message[0, 8:].view(dtype).float()
    is_number = expected.isfinite()
    assert torch.equal(found[0][is_number], expected[is_number])
    assert (found[0][~is_number].abs() > expected[is_number].max()).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zeros", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_signs_with_and_without_a_zero(dtype, zeros, kind):
    """Zeros get random signs; blocks without zeros are packed by other instructions."""
    codec = BlockCodec(signs("mean"), 128)
    values = numbers(1024, kind, dtype)
    values[values == 0] = 2.0**-80
    values[200 : 200 + zeros] = 0
    found = []
    for name in instruction_sets():
        use_instruction_set(name)
        found.append(list(run(codec, values, values / 8, 1, 0, "cpu")))
    for tensors in found[1:]:
        for one, other in zip(tensors, found[0], strict=True):
            assert same_numbers(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_conversions(kind, dtype):
    """Convert numbers into a bucket, and back."""
    found = []
    for name in instruction_sets():
        use_instruction_set(name)
        there = torch.empty(1003, dtype=dtype)
        back = torch.empty(1003)
        pack([numbers(1003, kind, torch.float32)], there, 0.3)
        unpack(there, [back], 3.0)
        found.append((there, back))
    for there, back in found[1:]:
        assert same_numbers(there, found[0][0])
        assert same_numbers(back, found[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selection(dtype):
    found = []
    for name in instruction_sets():
        use_instruction_set(name)
        gradient = numbers(70_001, "usual", dtype)
        found.append((select_largest(gradient, gradient / 3, 700), gradient))
    for indices, gradient in found[1:]:
        assert torch.equal(indices, found[0][0])
        assert same_bits(gradient, found[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selection_from_chunks(dtype):
    found = []
    for name in instruction_sets():
        use_instruction_set(name)
        gradient = numbers(70_001, "usual", dtype)
        found.append((select_largest_of_chunks(gradient, gradient / 3, 4096, 64), gradient))
    for indices, gradient in found[1:]:
        assert torch.equal(indices, found[0][0])
        assert same_bits(gradient, found[0][1])
