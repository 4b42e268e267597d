"""The fallback gives what the compiled loops give, bit for bit."""

import itertools
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import fallback, native
from commhooks.codecs import formats
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import Norm
from commhooks.codecs.index_code import IndexCode
from commhooks.extensions import KERNELS
from commhooks.kernels.source import BLOCK_CODEC, DIRECTORY

pytestmark = pytest.mark.skipif(not KERNELS.is_compiled, reason="commhooks._C is not compiled")

FORMATS = {
    **{
        f"{bits} bits, {levels} levels, {norm}{clip}{'?' * stochastic}": formats.integers(
            bits,  # type: ignore[arg-type]
            levels,
            norm=norm,  # type: ignore[arg-type]
            clip=clip,
            stochastic=stochastic,
        )
        for bits, levels in [(2, 1), (4, 7), (4, 2), (8, 127)]
        for norm, clip in [
            ("max", math.inf),
            ("max", 2.5),
            ("signed_max", math.inf),
            ("l2", math.inf),
        ]
        for stochastic in (False, True)
    },
    **formats.FORMATS,
    "sign mean": formats.signs("mean"),
    "sign mean vote": formats.signs("mean", majority=True),
    "sign root_mean": formats.signs("root_mean"),
    "sign root_mean vote": formats.signs("root_mean", majority=True),
}
KINDS = ["normal", "wide", "zeros", "tiny", "huge", "subnormal", "not finite"]
SIZES = {32: (95, 2), 96: (96 * 350 + 7, 1), 512: (1, 2), 4096: (3 * 4096 + 40, 1), 1024: (0, 2)}
"""For each block size, the number of elements and of parts."""
SEED = 2**63 + 12345


def draw(numel: int, dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(numel, generator=generator, dtype=torch.float64)
    others = torch.randn(numel, generator=generator, dtype=torch.float64)
    if kind == "wide":
        numbers *= torch.exp(20 * others)
    elif kind == "zeros":
        numbers[others > 0] = 0.0
        numbers[others > 1] = -0.0
    elif kind == "not finite" and numel > 3:
        numbers[numel // 2], numbers[numel // 3], numbers[-1] = math.inf, -math.inf, math.nan
    scale = {"tiny": 2.0**-100, "huge": 2.0**125, "subnormal": 2.0**-130}.get(kind, 1.0)
    return (numbers * scale).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    dtype = torch.int32 if one.dtype == torch.float32 else torch.int64
    return bool(((one.view(dtype) == other.view(dtype)) | (one.isnan() & other.isnan())).all())


def make(module: Any, name: str, block_size: int) -> Any:
    return module.CpuBlockCodec(FORMATS[name], block_size)


def run(module: Any, name: str, block_size: int, given: Tensor, error: Tensor | None) -> list[Any]:
    """All that a codec writes and returns for some numbers."""
    parts = SIZES[block_size][1]
    if FORMATS[name].group:  # blocks are multiples of 128
        block_size = -(-block_size // 128) * 128
    codec = make(module, name, block_size)
    length = -(-given.numel() // parts)
    values = given.clone()
    nbytes = BlockCodec(FORMATS[name], block_size).encoded_bytes(length)
    messages = torch.full((parts, nbytes), 7, dtype=torch.uint8)
    codec.encode(values, messages, length, error, SEED, error is not None)
    residual, kept = values.clone(), torch.zeros_like(values)
    finite = codec.assemble(messages, values, length, kept)
    mean = given.new_zeros(length)
    codec.average(messages, mean, length)
    # A message that no encoder writes: every code occurs.
    garbage = torch.randint(0, 256, messages.shape, dtype=torch.uint8, generator=_generator())
    scales = torch.randn(parts, -(-length // block_size), generator=_generator())
    garbage[:, : 4 * scales.shape[1]] = scales.view(torch.uint8)
    noise = given.new_zeros(length)
    codec.average(garbage, noise, length)
    return [messages, residual, values, kept, torch.tensor(finite), mean, noise]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_size", SIZES)
def test_messages_and_results(name: str, block_size: int) -> None:
    numel, _ = SIZES[block_size]
    for seed, kind in enumerate(KINDS):
        dtype = (torch.float32, torch.float64)[(seed + block_size // 32) % 2]
        given = draw(numel, dtype, kind, seed)
        error = draw(numel, dtype, "normal", 100) if seed % 3 else None
        compiled, found = (run(m, name, block_size, given, error) for m in (native, fallback))
        for what, (expected, written) in enumerate(zip(compiled, found, strict=True)):
            assert same_bits(expected, written), (kind, what)


@pytest.mark.parametrize("name", [name for name in formats.FORMATS if not FORMATS[name].group])
def test_floats_of_every_exponent(name: str) -> None:
    bits = torch.arange(0, 0x3F800000, 0x3FFF1, dtype=torch.int32)  # numbers from 0 to 1
    given = torch.cat([torch.ones(32), bits.view(torch.float32), -bits.view(torch.float32)])
    messages: list[Tensor] = []
    nbytes = BlockCodec(FORMATS[name], 4096).encoded_bytes(given.numel())
    for module in (native, fallback):
        codec = make(module, name, 4096)
        messages.append(torch.zeros(1, nbytes, dtype=torch.uint8))
        codec.encode(given.clone(), messages[-1], given.numel(), None, 0, False)
    assert torch.equal(*messages)


def test_random_numbers_beyond_four_billion_elements() -> None:
    """The index has 64 bits, of which the upper ones select another stream."""
    from commhooks.fallback.blocks import BlockRandom

    for first in (0, 2**32 - 32, 2**40 + 64):
        seed = (SEED + (first >> 32) * 0x9E3779B97F4A7C15) % 2**64
        expected = BlockRandom(seed, first % 2**32, 1, 64).bits()
        assert (BlockRandom(SEED, first, 2, 64).bits()[0] == expected[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("numel", "part_length"), [(0, 32), (5, 32), (1000, 352), (4096, 1376)])
def test_rotations(numel: int, part_length: int, dtype: torch.dtype) -> None:
    for kind in KINDS:
        given, error = draw(numel, dtype, kind, numel), draw(numel, dtype, "normal", 1)
        for added, inverse in itertools.product((None, error), (False, True)):
            one, other = given.clone(), given.clone()
            native.rotate(one, added, part_length, inverse)
            fallback.rotate(other, added, part_length, inverse)
            assert same_bits(one, other), kind


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [*KINDS, "integers"])
def test_selections(kind: str, dtype: torch.dtype) -> None:
    for numel in (1, 63, 100_003):
        given, error = draw(numel, dtype, kind, numel), draw(numel, dtype, kind, 1)
        if kind == "integers":
            given, error = given.round(), error.round()
        for count in {0, 1, numel // 100, numel // 2, numel}:
            for added in (None, error):
                one, other = given.clone(), given.clone()
                expected = native.select_largest(one, added, count)
                assert torch.equal(expected, fallback.select_largest(other, added, count)), count
                assert same_bits(one, other)
        for chunk, count in ((1, 1), (64, 3), (1000, 1000)):
            one, other = given.clone(), given.clone()
            expected = native.select_largest_of_chunks(one, error, chunk, count)
            found = fallback.select_largest_of_chunks(other, error, chunk, count)
            assert torch.equal(expected, found), chunk
            assert same_bits(one, other)
        for threshold in (1e-320, 1e-40, 0.5, 2.0, 1e39, math.inf):
            one, other = given.clone(), given.clone()
            expected = native.select_above(one, error, threshold)
            assert torch.equal(expected, fallback.select_above(other, error, threshold)), threshold
            assert same_bits(one, other)


@pytest.mark.parametrize("numel", [1, 63, 64, 1000, 70_001])
def test_packed_drawn_and_added_indices(numel: int) -> None:
    for count in sorted({0, 1, numel // 300, numel // 3, numel}):
        drawn = [torch.zeros(count, dtype=torch.int32) for _ in range(2)]
        for rotation in {0, numel // 2, numel - 1}:
            native.draw_indices(SEED - 2**63, rotation, numel, drawn[0])
            fallback.draw_indices(SEED - 2**63, rotation, numel, drawn[1])
            assert torch.equal(*drawn)
        code = IndexCode.shortest(numel, count)
        form = (code.high_bits, code.low_bits, code.adds_ordinal)
        packed = [torch.zeros(code.nbytes, dtype=torch.uint8) for _ in range(2)]
        native.pack_indices(drawn[0], *form, packed[0])
        fallback.pack_indices(drawn[0], *form, packed[1])
        assert torch.equal(*packed)
        fallback.unpack_indices(packed[0], *form, numel, drawn[1])
        assert torch.equal(*drawn)
        sums = [torch.ones(numel) for _ in range(2)]
        values = torch.randn(count, generator=_generator())
        native.scatter_add(values, drawn[0], sums[0])
        fallback.scatter_add(values, drawn[0], sums[1])
        assert torch.equal(*sums)


def test_damaged_indices_are_refused_alike() -> None:
    generator = _generator()
    numel, count = 500, 20
    code = IndexCode.shortest(numel, count)
    form = (code.high_bits, code.low_bits, code.adds_ordinal)
    indices = torch.zeros(count, dtype=torch.int32)
    native.draw_indices(3, 0, numel, indices)
    packed = torch.zeros(code.nbytes, dtype=torch.uint8)
    native.pack_indices(indices, *form, packed)
    refused = 0
    for _ in range(300):
        damaged = packed.clone()
        at = torch.randint(damaged.numel(), (2,), generator=generator)
        damaged[at] = torch.randint(256, (2,), dtype=torch.uint8, generator=generator)
        found = []
        for module in (native, fallback):
            out = torch.zeros_like(indices)
            try:
                module.unpack_indices(damaged, *form, numel, out)  # type: ignore[attr-defined]
                found.append(out.tolist())
            except RuntimeError as error:
                found.append(str(error).partition("\n")[0])
        assert found[0] == found[1]
        refused += isinstance(found[0], str)
    assert 0 < refused < 300


def test_one_warning_says_what_to_do() -> None:
    fallback.blocks.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            fallback.select_largest(torch.ones(3), None, 1)
    assert len(caught) == 1
    assert "pip install --no-build-isolation" in str(caught[0].message)


def test_headers_list_the_same_formats_and_norms() -> None:
    block = (DIRECTORY / "codecs" / "block.h").read_text()
    norms = re.findall(r"^  k(\w+),", block.partition("enum class Norm")[2].partition("}")[0], re.M)
    assert [norm.name.replace("_", "") for norm in Norm] == [norm.upper() for norm in norms]
    listed = {name.partition("<")[2].rpartition(",")[0] for name in BLOCK_CODEC.kernels}
    assert listed - {""} == {number_format.codes for number_format in FORMATS.values()}
