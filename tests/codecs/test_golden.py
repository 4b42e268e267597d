"""Every implementation of codecs and selections gives what golden.npz has.

Implementations are the compiled loops, the fallback, and the CUDA kernels in the emulation of a
GPU. The vectors were computed once, in float64 and without commhooks, from the formulas of the
papers, and stay as they are; what came later is held to the fallback, and the fallback to the
definitions in the other tests. Scales and decoded numbers are rounded to float32; codes and indices
are exact. A codec computes in float32, so a number close to where two codes meet may get either of
them: ``sure`` marks the others.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulation import emulated
from torch import Tensor

from commhooks import fallback, native
from commhooks.algorithms.sparse import selection
from commhooks.algorithms.sparse.messages import SparseVector, write_message
from commhooks.codecs.block import BlockCodec, rotate
from commhooks.codecs.formats import E3M0, E4M3, E5M2, MXFP4, NATURAL, NVFP4, integers, signs
from commhooks.codecs.index_code import IndexCode
from commhooks.kernels.launcher import blocks_for, launch
from commhooks.kernels.source import SPARSE, kernel_name

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))
SEED = 2**63 + 12345
SHORTER = 37  # numbers that the second part has less than the first one
FORMATS = {
    "int8": integers(8),
    "int8 stochastic": integers(8, stochastic=True),
    "int4": integers(4),
    "int4 stochastic": integers(4, stochastic=True),
    "int2": integers(2, norm="signed_max"),
    "qsgd max": integers(4, 5, stochastic=True),
    "qsgd l2": integers(8, 100, norm="l2", stochastic=True),
    "terngrad": integers(2, clip=2.5, stochastic=True),
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e3m0": E3M0,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "natural": NATURAL,
    "sign mean": signs("mean"),
    "sign root mean": signs("root_mean"),
    "sign majority": signs("mean", majority=True),
}


@pytest.fixture(params=["CPU", "fallback", "CUDA"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Choose what runs in a test: the module in use for CPU tensors, its fallback, or kernels."""
    if request.param == "CUDA":
        with emulated():
            yield request.param
        return
    if request.param == "fallback":
        for name in fallback.__all__:
            monkeypatch.setattr(native, name, getattr(fallback, name))
    yield request.param


def golden(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


@pytest.mark.parametrize("name", FORMATS)
def test_codec(name: str, implementation: str) -> None:
    bits, block, group, is_vote = GOLDEN[f"{name}/settings"].tolist()
    codec, given = BlockCodec(FORMATS[name], block), golden(f"{name}/y")
    length = (given.numel() + SHORTER) // 2
    counts = (length, length - SHORTER)
    messages = torch.full((2, codec.encoded_bytes(length)), 7, dtype=torch.uint8)
    values = given.clone()
    codec.encode(values, messages, length, seed=SEED, keep_residual=True)
    result = torch.zeros_like(given)
    for message, part, count in zip(messages, result.split(length), counts, strict=True):
        assert part.numel() == count
        codec.average(message[None], part, length)
    sure = GOLDEN[f"{name}/sure"]
    assert sure.mean() > 0.99
    layout = (length, bits, block, group)
    read = [
        split(message.numpy(), count, *layout)
        for message, count in zip(messages, counts, strict=True)
    ]
    scales, groups, codes = (np.concatenate(arrays) for arrays in zip(*read, strict=True))
    np.testing.assert_allclose(scales, GOLDEN[f"{name}/scales"], rtol=1e-6)
    np.testing.assert_array_equal(groups, GOLDEN[f"{name}/groups"])
    np.testing.assert_array_equal(codes[sure], GOLDEN[f"{name}/codes"][sure])
    decoded = result.numpy()
    np.testing.assert_allclose(decoded[sure], GOLDEN[f"{name}/decoded"][sure], rtol=2e-6)
    is_number = ~np.isnan(decoded)
    np.testing.assert_array_equal(values.numpy()[is_number], (given.numpy() - decoded)[is_number])

    mean = torch.zeros(counts[1])
    codec.average(messages, mean, length)
    both = np.stack([decoded[: counts[1]], decoded[length:]])
    expected = both.mean(0)
    if is_vote:
        of_blocks = np.split(GOLDEN[f"{name}/scales"], [-(-length // block)])
        of_numbers = [scales.repeat(block)[: counts[1]] for scales in of_blocks]
        expected = np.sign(np.sign(both).sum(0)) * np.mean(of_numbers, axis=0)
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-5, atol=1e-6)


def split(
    message: Any, count: int, length: int, bits: int, block: int, group: int
) -> tuple[Any, Any, Any]:
    """Return the scales of blocks, codes of groups and codes of numbers of a message.

    It has room for ``length`` numbers. What is behind the ``count`` numbers is zero.
    """
    blocks = -(-length // block)
    scales, rest = message[: 4 * blocks].view(np.float32), message[4 * blocks :]
    groups = -(-count // group) if group else 0
    room = 4 * -(-length // (4 * group)) if group else 0
    codes = np.unpackbits(rest[room:], bitorder="little").reshape(-1, bits) @ 2 ** np.arange(bits)
    assert not rest[groups:room].any()
    assert not codes[count:].any()
    return scales[: -(-count // block)], rest[:groups], codes[:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation(implementation: str, dtype: torch.dtype) -> None:
    given = golden("rotation/y").to(dtype)
    values = given.clone()
    rotate(values, values.numel())
    expected = golden("rotation/rotated")
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
    rotate(values, values.numel(), inverse=True)
    torch.testing.assert_close(values, given, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selection(implementation: str, dtype: torch.dtype) -> None:
    given = golden("selection/y").to(dtype)
    for count in (1, 3, 40, 1000):
        found = selection.select_largest(given.clone(), None, count)
        assert torch.equal(found, golden(f"selection/largest {count}"))
    found = selection.select_largest_of_chunks(given.clone(), None, 128, 5)
    assert torch.equal(found, golden("selection/chunks 128 5"))
    found = selection.select_above(given.clone(), None, 1.5)
    assert torch.equal(found, golden("selection/above 1.5"))


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.endswith(" indices")])
def test_index_code(implementation: str, name: str) -> None:
    numel, count, low_bits, adds_ordinal = map(int, name.split("/")[1].split()[:4])
    code = IndexCode(numel, count, low_bits, bool(adds_ordinal))
    indices, packed = golden(name), golden(name.removesuffix(" indices"))
    vector = SparseVector(indices, torch.ones(count), numel)
    assert torch.equal(write_message(vector, code)[: code.nbytes], packed)
    if implementation != "CUDA":
        assert torch.equal(code.unpack(packed), indices)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("drawn/")])
def test_drawn_indices(implementation: str, name: str) -> None:
    numel, _, rotation = map(int, name.split("/")[1].split())
    found = torch.zeros_like(golden(name))
    if implementation == "CUDA":
        arguments = (SEED - 2**63, rotation, numel, len(found), found)
        launch(SPARSE, kernel_name("draw"), arguments, grid=blocks_for(len(found)))
    else:
        native.draw_indices(SEED - 2**63, rotation, numel, found)
    assert torch.equal(found, golden(name))
