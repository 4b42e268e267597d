"""The kernels that pack and unpack buckets, on the CPU: see tests/emulation/cuda_emulation.h."""

import ctypes
import hashlib
import os
import random
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
TORCH_HEADERS = Path(torch.__file__).parent / "include"
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TILE = 4096
SMALL_TABLE, LARGE_TABLE = 168, 1360


class Piece(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
    ]


@cache
def library() -> ctypes.CDLL:
    """Compiled once, until anything that it is made of changes."""
    includes = ["tests/cuda_on_host", "tests/emulation", "csrc"]
    sources = [
        *ROOT.glob("tests/cuda_on_host/**/*.*"),
        *ROOT.glob("csrc/packing/cuda/*"),
        ROOT / "tests/emulation/cuda_emulation.h",
    ]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()
    target = ROOT / "build" / "emulation" / f"convert-{digest[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        command = [
            os.environ.get("CXX", "g++"),
            *("-std=gnu++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"),
            *("-ffp-contract=off", "-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas"),
            *(f"-I{ROOT / include}" for include in includes),
            f"-I{TORCH_HEADERS}",
            str(ROOT / "tests/cuda_on_host/convert.cpp"),
            *("-o", str(part)),
        ]
        subprocess.run(command, check=True)
        part.replace(target)
    return ctypes.CDLL(str(target))


def run(
    pieces: list[Piece],
    source: torch.dtype,
    destination: torch.dtype,
    scale: float,
    *,
    finite: Tensor | None = None,
    is_backward: bool = False,
) -> int:
    """How many kernels were launched. ``finite``: one bool, the kernels' flag."""
    array = (Piece * len(pieces))(*pieces)
    return int(
        library().convert(
            array,
            ctypes.c_size_t(len(pieces)),
            DTYPES.index(source),
            DTYPES.index(destination),
            ctypes.c_double(scale),
            ctypes.c_void_p(None if finite is None else finite.data_ptr()),
            int(is_backward),
        )
    )


def drawn(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def expected(source: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    wide = torch.float64 if torch.float64 in (source.dtype, dtype) else torch.float32
    factor = torch.tensor(scale, dtype=wide)
    result = source.to(wide) * factor
    return result.to(torch.float32).to(dtype) if dtype.itemsize == 2 else result.to(dtype)


def at(tensor: Tensor, element: int) -> int:
    return tensor.data_ptr() + element * tensor.itemsize


class Bucket:
    """Gradients somewhere in memory, and the bucket that they are packed into, back to back."""

    def __init__(
        self, lengths: list[int], source: torch.dtype, destination: torch.dtype, start: int = 0
    ) -> None:
        # Some sources are unaligned, as views of larger tensors are.
        self.lengths = lengths
        self.shifts = [start * (i % 5 == 3) for i in range(len(lengths))]
        self.sources = [
            drawn(length + shift, source, seed)
            for seed, (length, shift) in enumerate(zip(lengths, self.shifts, strict=True))
        ]
        self.start = start
        self.flat = torch.full((start + sum(lengths) + 9,), -7.0, dtype=destination)

    def pieces(self) -> list[Piece]:
        pieces, offset = [], self.start
        for source, shift, length in zip(self.sources, self.shifts, self.lengths, strict=True):
            pieces.append(Piece(at(source, shift), at(self.flat, offset), length))
            offset += length
        return pieces

    def check(self, scale: float, missing: frozenset[int] = frozenset()) -> None:
        offset = self.start
        assert torch.all(self.flat[:offset] == -7.0)
        for i, (source, shift, length) in enumerate(
            zip(self.sources, self.shifts, self.lengths, strict=True)
        ):
            found = self.flat[offset : offset + length]
            wanted = expected(source[shift:], self.flat.dtype, 0.0 if i in missing else scale)
            assert torch.equal(found, wanted), f"piece {i} of {length} elements"
            offset += length
        assert torch.all(self.flat[offset:] == -7.0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("destination", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_all_dtypes(source: torch.dtype, destination: torch.dtype) -> None:
    lengths = [1, 16, TILE, 0, 7, TILE + 1, 2 * TILE - 3, 5]
    bucket = Bucket(lengths, source, destination)
    assert run(bucket.pieces(), source, destination, 1 / 3) == 1
    bucket.check(1 / 3)


@pytest.mark.parametrize("start", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("is_backward", [False, True])
def test_places_that_are_not_aligned(start: int, is_backward: bool) -> None:
    lengths = [8, 24, 4, TILE, 2, 40, 1, 64, TILE + 8]
    for source, destination in [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]:
        bucket = Bucket(lengths, source, destination, start)
        run(bucket.pieces(), source, destination, 0.5, is_backward=is_backward)
        bucket.check(0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_missing_gradients_are_zeros(dtype: torch.dtype) -> None:
    bucket = Bucket([3, 64, TILE + 5, 9, 0, 1], dtype, dtype)
    pieces = bucket.pieces()
    missing = frozenset({1, 2, 5})
    for i in missing:
        pieces[i].source = None
    run(pieces, dtype, dtype, 2.0)
    bucket.check(2.0, missing)


def test_in_place() -> None:
    values = drawn(3 * TILE + 5, torch.float32, 0)
    wanted = values * 0.25
    run([Piece(at(values, 0), at(values, 0), values.numel())], *2 * [torch.float32], 0.25)
    assert torch.equal(values, wanted)


def test_non_finite_numbers_come_through() -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 7e4, 1e-8], dtype=torch.float32)
    found = torch.empty(5, dtype=torch.float16)
    run([Piece(at(values, 0), at(found, 0), 5)], torch.float32, torch.float16, 1.0)
    assert torch.equal(found.isnan(), torch.tensor([False, False, True, False, False]))
    assert found.tolist()[:2] == [torch.inf, -torch.inf]
    assert found[3] == torch.inf
    assert found[4] == 0.0


# Dtypes of the source and the bucket, and numbers that are not finite in the bucket.
NON_FINITE = [
    (torch.float64, torch.float64, (torch.inf, -torch.inf, torch.nan)),
    (torch.float32, torch.float32, (torch.inf, -torch.inf, torch.nan, 3e38)),
    (torch.float16, torch.float16, (torch.inf, -torch.inf, torch.nan, 6e4)),
    (torch.bfloat16, torch.bfloat16, (torch.inf, -torch.inf, torch.nan, 3e38)),
    (torch.float32, torch.float16, (7e4, -7e4)),
    (torch.float64, torch.float32, (1e300,)),
    (torch.float32, torch.bfloat16, (torch.finfo(torch.float32).max / 2,)),
]


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(("source", "destination", "numbers"), NON_FINITE)
def test_whether_all_is_finite(source, destination, numbers, is_backward) -> None:
    lengths = [5, 0, 2 * TILE + 3, 64, 1]
    bucket = Bucket(lengths, source, destination, start=3)
    flag = torch.ones((), dtype=torch.bool)
    for i, length in [(0, 5), (2, 2 * TILE + 3), (3, 64), (4, 1)]:
        for place in {0, length // 2, length - 1}:
            run(bucket.pieces(), source, destination, 2.0, finite=flag, is_backward=is_backward)
            assert flag
            at_place = bucket.sources[i][bucket.shifts[i] + place : bucket.shifts[i] + place + 1]
            before = at_place.clone()
            for number in numbers:
                at_place.fill_(number)
                run(bucket.pieces(), source, destination, 2.0, finite=flag)
                assert not flag
                flag.fill_(True)
            at_place.copy_(before)


def test_whether_all_is_finite_adds_up_over_launches_and_leaves_out_what_is_missing() -> None:
    bucket = Bucket([1] * (LARGE_TABLE + 1), torch.float32, torch.float32)
    bucket.sources[3].fill_(torch.nan)
    flag = torch.ones((), dtype=torch.bool)
    pieces = bucket.pieces()
    assert run(pieces, torch.float32, torch.float32, 1.0, finite=flag) == 2
    assert not flag
    flag.fill_(True)
    pieces[3].source = None
    run(pieces, torch.float32, torch.float32, 1.0, finite=flag)
    assert flag


@pytest.mark.parametrize(
    ("count", "launches"),
    [
        (1, 1),
        (SMALL_TABLE, 1),
        (SMALL_TABLE + 1, 1),
        (LARGE_TABLE, 1),
        (LARGE_TABLE + 1, 2),
        pytest.param(3 * LARGE_TABLE + 2, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_lists_larger_than_a_table(count: int, launches: int) -> None:
    lengths = [i % 5 + 1 for i in range(count)]
    bucket = Bucket(lengths, torch.float32, torch.float32)
    assert run(bucket.pieces(), torch.float32, torch.float32, 3.0) == launches
    bucket.check(3.0)


def test_nothing_to_do_launches_nothing() -> None:
    empty = Bucket([0, 0], torch.float32, torch.float32)
    assert run(empty.pieces(), torch.float32, torch.float32, 1.0) == 0


@pytest.mark.parametrize("seed", range(8))
def test_mixes_of_all_kinds(seed: int) -> None:
    chance = random.Random(seed)
    source, destination = chance.choice(DTYPES), chance.choice(DTYPES)
    lengths = [chance.choice([0, 1, 3, 8, 31, 256, 1000, TILE + 17]) for _ in range(40)]
    bucket = Bucket(lengths, source, destination, start=chance.randrange(9))
    pieces = bucket.pieces()
    missing = frozenset(i for i in range(len(pieces)) if chance.random() < 0.2)
    for i in missing:
        pieces[i].source = None
    run(pieces, source, destination, 0.1, is_backward=bool(seed % 2))
    bucket.check(0.1, missing)


def test_a_device_without_an_image_is_found_before_a_launch_fails():
    """Torch's operations pack there, and no later launch reports the error."""
    has_image = library().has_image
    has_image.restype = ctypes.c_bool
    assert has_image(True)
    assert not has_image(False)
    bucket = Bucket([5], torch.float32, torch.float32)
    assert run(bucket.pieces(), torch.float32, torch.float32, 1.0) == 1
    bucket.check(1.0)
