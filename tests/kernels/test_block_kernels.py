"""Kernels give the bytes of the loops on the CPU: emulated, and on a GPU if there is one."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from emulation import emulated
from support.codec_runs import CODECS, numbers, run
from torch import Tensor

from commhooks import CommHookError
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import integers
from commhooks.codecs.rounding import round_stochastically
from commhooks.testing.compare import same_bits


@dataclass(frozen=True)
class Machine:
    """Where kernels run: in the emulation if ``device`` is "cpu", otherwise on a GPU."""

    device: str
    is_backward: bool = False

    def active(self) -> AbstractContextManager[None]:
        return emulated(self.is_backward) if self.device == "cpu" else nullcontext()


@pytest.fixture(
    params=[
        Machine("cpu"),
        Machine("cpu", is_backward=True),
        pytest.param(Machine("cuda:0"), marks=pytest.mark.gpu),
    ],
    ids=["emulated", "emulated backward", "gpu"],
)
def machine(request: pytest.FixtureRequest) -> Machine:
    if request.param.device != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def check(
    machine: Machine,
    codec: BlockCodec,
    given: Tensor,
    error: Tensor | None,
    parts: int,
    offset: int,
) -> None:
    case = (given, error, parts, offset)
    expected = list(run(codec, *case, "cpu"))
    with machine.active():
        found = [tensor.cpu() for tensor in run(codec, *case, machine.device)]
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.is_floating_point():  # all NaNs count as equal
            one, other = one.nan_to_num(123.0, math.inf), other.nan_to_num(123.0, math.inf)
        assert same_bits(one, other), f"tensor {index}"


half = pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
"""The two halves of the cases of a test. Each has all pairs of values."""


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CODECS)
@half
def test_same_bytes_for_all_kinds_of_numbers(machine, name, dtype, half):
    codec = CODECS[name](64)
    for index, kind in enumerate(("usual", "any size", "tiny", "zeros", "not finite")):
        given = numbers(1000, kind, dtype)
        has_error = (index + half + machine.is_backward) % 2
        error = numbers(1000, "usual", dtype) * 1e-2 if has_error else None
        check(machine, codec, given, error, 3, 0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("block", [32, 96, 256, 512, 544, 1024, 2080, 4096])
@pytest.mark.parametrize(
    "name", ["int8", "int4", "int2", "mxfp4", "nvfp4", "ternary, clipped", "sign, root mean"]
)
def test_same_bytes_for_all_block_sizes(machine, name, block):
    codec = CODECS[name](block)
    for numel in (block - 1, 3 * block, 5 * block + 77):
        check(machine, codec, numbers(numel, "usual", torch.float32), None, 2, 0)


@pytest.mark.parametrize(
    "name", ["int8", "int2", "2 bits", "mxfp4", "nvfp4", "4 levels, l2", "majority"]
)
@half
def test_same_bytes_for_all_lengths_and_alignments(machine, name, half):
    codec = CODECS[name](32)
    for i, numel in enumerate((0, 1, 2, 31, 32, 33, 64, 129)):
        for j, parts in enumerate((1, 3, 5)):
            given = numbers(numel, "usual", torch.float32)
            check(machine, codec, given, given / 8, parts, offset=(i + j + half) % 2)


@pytest.mark.parametrize("numel", [1, 7, 1000, 70_001])
def test_rounding_to_bfloat16_stochastically(machine, numel):
    values = numbers(numel + 1, "any size", torch.float32)
    for offset in (0, 1):  # of what is aligned in memory
        given = values[offset : offset + numel]
        expected = round_stochastically(given, 1 / 3, torch.empty(numel).bfloat16(), seed=5)
        there = values.to(machine.device)[offset : offset + numel]
        room = torch.empty(numel + 1, dtype=torch.bfloat16, device=machine.device)
        with machine.active():
            found = round_stochastically(there, 1 / 3, room[offset:][:numel], seed=5).cpu()
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_errors_name_the_mistake(machine):
    codec, device = BlockCodec(integers(8), 32), machine.device
    room = torch.empty(1, 8, dtype=torch.uint8, device=device)
    values = torch.ones(4, device=device)
    with machine.active():
        with pytest.raises(CommHookError, match=r"float32 or float64, found .* in torch.float16"):
            codec.encode(values.half(), room, 4)
        with pytest.raises(CommHookError, match=r"rows of 108 bytes for 96 of the 4 values"):
            codec.encode(values, room, 96)
        with pytest.raises(CommHookError, match=r"rows of 8 bytes for 3 of the 4 values"):
            codec.encode(values, room, 3)
        with pytest.raises(CommHookError, match=r"errors like the numbers, \(4,\)"):
            codec.encode(values, room, 4, error=torch.ones(3, device=device))
        unaligned = torch.empty(9, dtype=torch.uint8, device=device)[1:][None]
        with pytest.raises(CommHookError, match=r"aligned to 4 bytes; found .* at 0x"):
            codec.encode(values, unaligned, 4)
        with pytest.raises(CommHookError, match=r"one part of at most 2 values"):
            codec.average(room, values, 2)
        with pytest.raises(CommHookError, match=r"flat and contiguous, .* strides \(2,\)"):
            codec.encode(torch.ones(8, device=device)[::2], room, 4)
