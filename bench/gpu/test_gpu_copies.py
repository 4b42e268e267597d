"""Packing and unpacking of buckets against a plain copy of memory, and against torch's copies."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.copies import Run, against_copy, against_other
from bench.models import parameter_shapes
from commhooks.lab.networks import GPT2Small
from reducer import native

pytestmark = pytest.mark.skipif(not native.has_kernels("cuda"), reason="built without nvcc")


def gradients(dtype: torch.dtype) -> list[Tensor]:
    """Return 1.5 GB of float32: three times the shapes of GPT-2 small."""
    shapes = 3 * parameter_shapes(GPT2Small)
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def flat_of(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.empty(sum(t.numel() for t in tensors), device="cuda", dtype=dtype)


@pytest.mark.benchmark(group="gpu: pack and unpack, 3 times GPT-2 small")
@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["pack", "unpack"])
def test_large(benchmark: Any, way: str, dtype: torch.dtype, wire: torch.dtype) -> None:
    """Pack and unpack all parameters in one launch; buckets of 25 MB consist of the same blocks."""
    tensors = gradients(dtype)
    flat = flat_of(tensors, wire)
    native.pack(tensors, flat, 0.5)
    assert torch.equal(flat, torch.cat([(t.float() * 0.5).to(wire).view(-1) for t in tensors]))
    unpacked = [torch.empty_like(tensor) for tensor in tensors]
    native.unpack(flat, unpacked)
    assert torch.equal(torch.cat([t.view(-1) for t in unpacked]), flat.to(dtype))
    del unpacked
    like = flat if way == "pack" else flat_of(tensors, dtype)
    pack, unpack = partial(native.pack, tensors, flat, 0.5), partial(native.unpack, flat, tensors)
    run = pack if way == "pack" else unpack
    against_copy(benchmark, run, flat.nbytes + sum(t.nbytes for t in tensors), like)


@pytest.mark.benchmark(group="gpu: pack and unpack, 2000 x 256")
@pytest.mark.parametrize("way", ["pack", "unpack"])
def test_many_small(benchmark: Any, way: str) -> None:
    """Compare with one copy per parameter, and with torch's foreach operations."""
    tensors = [torch.randn(256, device="cuda") for _ in range(2000)]
    flat = flat_of(tensors, torch.float32)
    views = list(flat.split(256))
    native.pack(tensors, flat)
    assert torch.equal(flat, torch.cat(tensors))
    unpacked = [torch.empty_like(tensor) for tensor in tensors]
    native.unpack(flat, unpacked)
    assert torch.equal(torch.cat(unpacked), flat)
    pack, unpack = partial(native.pack, tensors, flat), partial(native.unpack, flat, tensors)
    to, source, run = (views, tensors, pack) if way == "pack" else (tensors, views, unpack)

    def one_by_one() -> None:
        for destination, gradient in zip(to, source, strict=True):
            destination.copy_(gradient)

    foreach = partial(torch._foreach_copy_, to, source)
    runs: dict[str, Run] = {"torch, one by one": one_by_one, "torch, foreach": foreach, "ours": run}
    against_other(benchmark, runs)
