"""Copies of tensors into a flat tensor and back; on CUDA see gpu/test_gpu_copies.py."""

import pytest
import torch

from reducer import native

pytestmark = pytest.mark.usefixtures("two_threads")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpack_restores_what_pack_wrote(dtype: torch.dtype, to: torch.dtype) -> None:
    tensors = [torch.randn(n).to(dtype) for n in (5, 0, 70_000, 1)]
    flat = torch.full((70_010,), 7.0, dtype=to)
    native.pack(tensors, flat, 0.25)
    assert torch.equal(flat[:70_006], (torch.cat(tensors).double() * 0.25).to(to))
    assert torch.all(flat[70_006:] == 7.0)
    back = [torch.empty_like(tensor) for tensor in tensors]
    native.unpack(flat, back, 4.0)
    assert torch.equal(torch.cat(back), (flat[:70_006].double() * 4.0).to(dtype))


@pytest.mark.covering(2)
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_reports_whether_all_numbers_are_finite(
    dtype: torch.dtype, to: torch.dtype, scale: float
) -> None:
    """The flag is about the numbers written: overflow in the conversion counts as well."""
    tensors = [torch.randn(n).to(dtype) for n in (5, 0, 70_001, 1)]
    flat, flag = torch.empty(70_007, dtype=to), torch.ones((), dtype=torch.bool)
    native.pack(tensors, flat, scale, finite=flag)
    assert flag
    largest = torch.finfo(dtype).max
    for tensor, place in [(0, 0), (2, 0), (2, 2047), (2, 2048), (2, 70_000), (3, 0)]:
        before = tensors[tensor][place].clone()
        for number in (torch.inf, -torch.inf, torch.nan, largest):
            tensors[tensor][place] = number
            flag.fill_(True)
            native.pack(tensors, flat, scale, finite=flag)
            assert bool(flag) == bool(flat.isfinite().all())
            assert not flag or number == largest
        tensors[tensor][place] = before
    flag.fill_(False)
    native.pack(tensors, flat, scale, finite=flag)
    assert not flag


def test_memory_order_is_kept() -> None:
    tensor = torch.randn(4, 5).T
    flat = torch.empty(20)
    native.pack([tensor], flat)
    assert torch.equal(flat.view(4, 5).T, tensor)


def test_arguments_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match="at most 3"):
        native.pack([torch.ones(4)], torch.empty(3))
    with pytest.raises(ValueError, match=r"strides \[2\]"):
        native.pack([torch.ones(8)[::2]], torch.empty(9))
    with pytest.raises(ValueError, match="dense tensors"):
        native.pack([torch._neg_view(torch.ones(4))], torch.empty(4))
    with pytest.raises(ValueError, match="one dtype"):
        native.pack([torch.ones(1), torch.ones(1, dtype=torch.float64)], torch.empty(9))
    with pytest.raises(ValueError, match="one bool on cpu"):
        native.pack([torch.ones(1)], torch.empty(9), finite=torch.ones(()))
    with pytest.raises(ValueError, match="contiguous flat"):
        native.pack([torch.ones(1)], torch.empty(9)[::2])


def test_devices_with_kernels() -> None:
    assert native.has_kernels("cpu")
    assert not native.has_kernels("meta")
