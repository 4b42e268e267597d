"""Packing and unpacking on the device. The same kernels run on the CPU in test_cuda_convert.py."""

import pytest
import torch
from torch import Tensor

from reducer import native

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [4096, 1, 7, 64, 0, 12_289, 3, 256, 5000]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if not native.has_kernels("cuda"):
        pytest.skip("built without nvcc: torch's foreach operations copy")


def gradients(lengths: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [
        torch.randn(n, generator=generator, device="cuda", dtype=torch.float64).to(dtype)
        for n in lengths
    ]


def reference(tensors: list[Tensor], dtype: torch.dtype, scale: float) -> Tensor:
    wide = torch.float64 if torch.float64 in (tensors[0].dtype, dtype) else torch.float32
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(wide)
    product = flat * torch.tensor(scale, dtype=wide, device="cuda")
    return product.float().to(dtype) if dtype.itemsize == 2 else product.to(dtype)


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_both_ways(dtype: torch.dtype, to: torch.dtype) -> None:
    tensors = gradients(LENGTHS, dtype)
    flat = torch.full((sum(LENGTHS),), 7.0, device="cuda", dtype=to)
    native.pack(tensors, flat, 1 / 3)
    assert torch.equal(flat, reference(tensors, to, 1 / 3))
    back = [torch.empty_like(tensor) for tensor in tensors]
    native.unpack(flat, back)
    assert torch.equal(torch.cat(back), reference([flat], dtype, 1.0))


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finite_check(dtype: torch.dtype, to: torch.dtype) -> None:
    tensors = gradients(LENGTHS, dtype)
    flat = torch.empty(sum(LENGTHS), device="cuda", dtype=to)
    flag = torch.ones((), dtype=torch.bool, device="cuda")
    native.pack(tensors, flat, 2.0, finite=flag)
    assert flag
    for tensor in (0, 3, 5):
        before = tensors[tensor][-1].clone()
        for number in (torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max):
            tensors[tensor][-1] = number
            flag.fill_(True)
            native.pack(tensors, flat, 2.0, finite=flag)
            assert flag == flat.isfinite().all()
        tensors[tensor][-1] = before


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_misaligned_memory(shift: int) -> None:
    lengths = [9, 4096, 17, 1000]
    tensors = [tensor[shift:] for tensor in gradients(lengths, torch.float32)]
    numel = sum(tensor.numel() for tensor in tensors)
    memory = torch.full((numel + 2 * shift,), 7.0, device="cuda")
    native.pack(tensors, memory[shift : shift + numel], 2.0)
    assert torch.equal(memory[shift : shift + numel], reference(tensors, torch.float32, 2.0))
    assert torch.all(memory[:shift] == 7.0)
    assert torch.all(memory[shift + numel :] == 7.0)


def test_more_tensors_than_fit_in_kernel_arguments() -> None:
    tensors = gradients([i % 7 for i in range(3000)], torch.float32)
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), device="cuda")
    native.pack(tensors, flat)
    assert torch.equal(flat, torch.cat(tensors))


def test_on_the_current_stream() -> None:
    """The kernel runs after earlier work of the stream and does not wait for other streams."""
    tensors = gradients([100_000], torch.float32)
    flat = torch.zeros(100_000, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        tensors[0].fill_(5.0)
        native.pack(tensors, flat, 2.0)
    stream.synchronize()
    assert torch.all(flat == 10.0)


def test_captured_in_a_graph() -> None:
    tensors = gradients([1000, 3, 50], torch.float32)
    flat = torch.zeros(1053, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.pack(tensors, flat, 0.5)
    for value in (1.0, 2.0):
        for tensor in tensors:
            tensor.fill_(value)
        graph.replay()
        assert torch.all(flat == value / 2)
