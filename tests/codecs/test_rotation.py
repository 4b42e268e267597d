"""Rotated codecs: against the matrix in float64, and against the codec without a rotation."""

import pytest
import torch
from torch import Tensor

from commhooks.codecs.block import BlockCodec, rotate
from commhooks.codecs.formats import integers


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    return matrix


def sign(place: int) -> int:
    mixed = place * 0x9E3779B1 % 2**32
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 % 2**32
    return -1 if mixed >> 31 else 1


def blocks_of(count: int) -> list[int]:
    """Return the sizes of a part's blocks."""
    return [128] * (count // 128) + [size for size in (64, 32, 16, 8, 4, 2, 1) if count & size]


def by_matrices(numbers: Tensor, part_length: int) -> Tensor:
    parts = []
    for part in numbers.double().split(part_length):
        signs = torch.tensor([sign(place) for place in range(len(part))])
        blocks = (part * signs).split(blocks_of(len(part)))
        parts += [hadamard(len(block)) @ block / len(block) ** 0.5 for block in blocks]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("numel", "part_length"), [(1, 32), (128, 128), (127, 128), (1000, 352), (900, 300)]
)
def test_numbers_are_multiplied_by_the_matrix(
    numel: int, part_length: int, dtype: torch.dtype
) -> None:
    numbers, added = torch.randn(2, numel, dtype=dtype)
    expected = by_matrices(numbers.double() + added, part_length)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    found = numbers.clone()
    rotate(found, part_length, added=added)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    assert found.norm().item() == pytest.approx((numbers + added).norm().item(), rel=1e-5)
    rotate(found, part_length, inverse=True)
    torch.testing.assert_close(found, numbers + added, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("values", "added", "part_length"),
    [
        (torch.zeros(4, dtype=torch.float16), None, 4),
        (torch.zeros(2, 2), None, 4),
        (torch.zeros(4), torch.zeros(5), 4),
        (torch.zeros(4), torch.zeros(4).double(), 4),
        (torch.zeros(4), None, 0),
    ],
)
def test_tensors_that_do_not_fit(values: Tensor, added: Tensor | None, part_length: int) -> None:
    with pytest.raises(RuntimeError, match=r"expected (numbers|errors|parts)"):
        rotate(values, part_length, added=added)


def sent(codec: BlockCodec, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is decoded of these numbers, and the residual."""
    residual, decoded = numbers.clone(), torch.empty_like(numbers)
    messages = torch.empty(2, codec.encoded_bytes(len(numbers) // 2), dtype=torch.uint8)
    codec.encode(residual, messages, len(numbers) // 2, keep_residual=True)
    assert codec.assemble(messages, decoded, len(numbers) // 2)
    return decoded, residual


@pytest.mark.parametrize("bits", [2, 4])
def test_large_numbers_cost_the_others_less(bits: int) -> None:
    """The numbers have a Student distribution with three degrees of freedom."""
    number_format = integers(bits, norm="signed_max" if bits == 2 else "max")
    codec, rotated = (BlockCodec(number_format, 128, rotated=r) for r in (False, True))
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4, 128 * 64, generator=generator)
    numbers = normal[0] / normal[1:].square().mean(0).sqrt()
    assert rotated.encoded_bytes(1000) == codec.encoded_bytes(1000)
    errors = []
    for each in (codec, rotated):
        decoded, residual = sent(each, numbers)
        torch.testing.assert_close(decoded + residual, numbers, rtol=0, atol=1e-4)
        errors.append((residual.norm() / numbers.norm()).item())
    assert errors[1] < 0.8 * errors[0]


def test_the_message_is_the_same_if_the_residual_is_not_kept() -> None:
    numbers, error = torch.randn(1000), torch.randn(1000)
    codec = BlockCodec(integers(4), 64, rotated=True)
    messages = torch.empty(2, codec.encoded_bytes(1000), dtype=torch.uint8)
    for message, keep_residual in zip(messages.split(1), (False, True), strict=True):
        codec.encode(numbers.clone(), message, 1000, error=error, keep_residual=keep_residual)
    assert torch.equal(*messages)
    decoded = torch.empty(1000)
    codec.average(messages[:1], decoded, 1000)
    assert (decoded - numbers - error).norm() < 0.2 * (numbers + error).norm()


def test_what_is_not_finite_is_noticed() -> None:
    codec = BlockCodec(integers(4), 64, rotated=True)
    numbers = torch.randn(1000)
    numbers[7] = torch.inf
    messages = torch.empty(1, codec.encoded_bytes(1000), dtype=torch.uint8)
    codec.encode(numbers, messages, 1000)
    kept, result = torch.zeros(1000), torch.zeros(1000)
    assert not codec.assemble(messages, result, 1000, kept=kept)
    assert result.isnan().all()
    assert not kept.any()
