"""The index code: against Python integers, and against the entropy of the indices."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from commhooks.codecs.index_code import IndexCode


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Draw sparse and dense sets, up to the largest possible bucket."""
    numel = draw(st.integers(1, 300) | st.integers(1, 2**31 - 1))
    limit = min(numel, 300)
    chosen = draw(st.sets(st.integers(0, numel - 1), max_size=limit))
    return numel, sorted(chosen)


def words(bits: int) -> int:
    return math.ceil(bits / 64) * 8


def written(code: IndexCode, indices: list[int]) -> bytes:
    """Pack as Note [Index code] says, with one integer each for the bitmap and the low bits."""
    size = 1 << code.low_bits
    bits = [index // size + rank * code.adds_ordinal for rank, index in enumerate(indices)]
    assert len(set(bits)) == len(indices)
    high = sum(1 << bit for bit in bits)
    low = sum((index % size) << (rank * code.low_bits) for rank, index in enumerate(indices))
    return high.to_bytes(words(code.high_bits), "little") + low.to_bytes(
        words(len(indices) * code.low_bits), "little"
    )


@given(index_sets())
@example((2_113_929_217, [0]))  # its bitmap covers 2**31 elements
@example((5, [4]))
def test_bytes_are_as_documented(case):
    numel, chosen = case
    code = IndexCode.shortest(numel, len(chosen))
    expected = written(code, chosen)
    indices = torch.tensor(chosen, dtype=torch.int32)
    packed = torch.full((code.nbytes,), 0xFF, dtype=torch.uint8)
    code.pack(indices, out=packed)
    assert bytes(packed.tolist()) == expected
    assert torch.equal(code.unpack(packed), indices)


@pytest.mark.parametrize("numel", [1, 2, 63, 64, 65, 1000, 10**6, 2**31 - 1])
def test_size_never_falls_with_more_indices(numel):
    counts = sorted({0, 1, 2, 3, *(int(numel * share / 200) for share in range(201)), numel})
    sizes = [IndexCode.shortest(numel, count).nbytes for count in counts if count <= numel]
    assert sizes == sorted(sizes)
    assert sizes[-1] <= math.ceil(numel / 64) * 8


@pytest.mark.parametrize("density", [1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.3, 0.5, 1.0])
def test_size_is_close_to_the_entropy(density):
    """Below a quarter, at most 0.7 bits per index more than the entropy of a random set."""
    numel = 10**7
    count = round(density * numel)
    bits = IndexCode.shortest(numel, count).nbytes * 8
    if density < 0.25:
        entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density))
        assert bits / count < entropy / density + 0.7 + 128 / count
        assert bits / count < 2 + math.log2(1 / density) + 128 / count
    else:
        assert bits <= numel + 64


def test_damaged_messages_are_refused():
    code = IndexCode.shortest(1000, 3)
    packed = torch.zeros(code.nbytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"3 ascending indices below 1000.*corrupted"):
        code.unpack(packed)
    with pytest.raises(RuntimeError, match="3 ascending indices"):
        code.unpack(torch.full_like(packed, 0xFF))
    with pytest.raises(RuntimeError, match=f"expected {code.nbytes} bytes for 3"):
        code.unpack(packed[1:])
    with pytest.raises(RuntimeError, match="Expected indices below "):
        code.pack(torch.tensor([0, 1, 10**6], dtype=torch.int32), out=packed)
