"""Tensors of numbers to messages and back, and their rotation: csrc/codecs/block_codec.h.

The formulas are those of kernels/codecs/*.h. Words of 32 bits are int32, whose sums and products
wrap around. Tensors of numbers and codes have the shape (blocks, block_size), those of scales
(blocks, 1).
"""

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_LARGEST_NUMBER, _SMALLEST_LARGEST = 2.0**126, 2.0**-100
_CHUNK, _TILE = 512, 64
_ROTATION = 128


@functools.cache
def warn_once() -> None:
    """Say what the compiled extension would gain, when CPU tensors are encoded or selected."""
    warnings.warn(
        "commhooks is installed without its compiled extensions: on CPU tensors, hooks compute the "
        "same bits in torch's operations, where quantizing and decoding take about 20 times as "
        "long, and selecting the largest elements 4 times (GPUs run the same kernels). To compile "
        "the extensions, you need a C++20 compiler: `pip install --no-build-isolation "
        "--force-reinstall --no-deps .` in the sources",
        stacklevel=3,
    )


class CpuBlockCodec:
    """Encodes numbers as blocks of codes with one float32 scale each.

    ``number_format`` is a Format of codecs/formats.py, which has the arithmetic of a block.
    """

    def __init__(self, number_format: Any, block_size: int) -> None:
        self._format, self._size = number_format, block_size
        self._numbers, self._group_scales = number_format.numbers(), number_format.group_scales()
        shifts = torch.arange(0, 8, number_format.bits)
        rows = self._numbers[(torch.arange(256)[:, None] >> shifts) & (2**number_format.bits - 1)]
        # Rows of one element are selected faster: pairs of numbers count as one.
        self._numbers_of_byte = (rows if rows.size(1) == 1 else rows.view(torch.float64)).squeeze(1)

    def encode(
        self,
        values: Tensor,
        messages: Tensor,
        part_length: int,
        error: Tensor | None,
        seed: int,
        keep_residual: bool,
    ) -> None:
        """Write the messages of values + error; with ``keep_residual`` the residual to values."""
        warn_once()
        blocks = -(-part_length // self._size)
        for part, message in enumerate(messages if blocks else ()):
            span = slice(part * part_length, (part + 1) * part_length)
            given = values.detach()[span]
            if error is not None:
                given = given + error.detach()[span]
            y = pad(given.float(), (0, blocks * self._size - given.numel())).view(
                blocks, self._size
            )
            random = BlockRandom(seed, span.start, *y.shape)
            scales, groups, codes, factors = self._encode(y, given.numel(), random)
            packed = packed_bits(codes.view(-1), self._format.bits)
            written = (scales.view(torch.uint8), groups, packed)
            for room, found in zip(self._rooms(message, part_length), written, strict=True):
                room.copy_(found.view(-1)[: room.numel()])
            if keep_residual:
                decoded = _select(self._numbers, codes).view_as(y).mul_(factors)
                values.detach()[span] = given - decoded.view(-1)[: given.numel()]

    def _encode(self, y: Tensor, count: int, random: "BlockRandom") -> tuple[Tensor, ...]:
        """Return scales, group codes, codes and factors.

        A number decodes to ``numbers[code] * factor``.
        """
        number_format = self._format
        counts = (count - self._size * torch.arange(len(y))).clamp(0, self._size)[:, None]
        largest = y.abs().amax(1, keepdim=True)  # NaN if there is one
        has_scale = (largest >= _SMALLEST_LARGEST) & (largest <= _LARGEST_NUMBER)
        scales = number_format.scale(largest, _norm_of(number_format.norm.name, y, largest, counts))
        without = torch.where(largest < _SMALLEST_LARGEST, 0.0, math.nan)
        scales = torch.where(has_scale, scales, without)
        inverses, factors = scales.reciprocal(), torch.where(has_scale, scales, 0.0)
        groups = torch.empty(0, dtype=torch.uint8)
        if group := number_format.group:
            of_groups = y.abs().view(len(y), -1, group).amax(2)
            groups = number_format.group_code(of_groups * inverses) * has_scale
            groups.view(-1)[-(-count // group) :] = 0
            group_scales = _select(self._group_scales, groups).view_as(groups)
            inverses = inverses / torch.where(group_scales == 0, 1.0, group_scales)
            inverses = inverses.repeat_interleave(group, 1)
            factors = (group_scales * factors).repeat_interleave(group, 1)
        codes = number_format.code(y * inverses, random).mul_(has_scale)
        codes.view(-1)[count:] = 0
        return scales, groups, codes, factors

    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        """Write the mean, or the vote, of the messages to values."""
        warn_once()
        blocks, number_format = -(-part_length // self._size), self._format
        share = torch.tensor(len(messages)).reciprocal()
        mean_scale = torch.zeros(blocks, 1)
        sums = torch.full((blocks, self._size), -0.0)  # the neutral element of addition
        for message in messages if blocks else ():
            scales, groups, packed = self._rooms(message, part_length)
            scales = scales.clone().view(torch.float32)[:, None]
            mean_scale += scales * share
            weights = (scales != 0).float() if number_format.is_vote else scales * share
            if group := number_format.group:
                of_groups = pad(
                    _select(self._group_scales, groups),
                    (0, -groups.numel() % (self._size // group)),
                )
                weights = of_groups.view(blocks, -1) * weights
                weights = weights.repeat_interleave(group, 1)
            numbers = _select(self._numbers_of_byte, packed).view(torch.float32).view(-1)
            numbers = pad(numbers, (0, sums.numel() - numbers.numel()))
            sums += numbers.view_as(sums).mul_(weights)
        if number_format.is_vote:
            sums = sums.clamp_(-1, 1).mul_(mean_scale)
        values.detach().copy_(sums.view(-1)[: values.numel()])

    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, kept: Tensor | None
    ) -> bool:
        """Decode the messages of all parts; return whether they are finite."""
        scales = self._rooms(messages, part_length)[0].reshape(-1).clone().view(torch.float32)
        if not scales.isfinite().all():
            values.fill_(math.nan)
            return False
        if kept is not None:
            kept.copy_(values)
        for message, part in zip(messages, torch.split(values, part_length), strict=False):
            self.average(message[None], part, part_length)
        return True

    def _rooms(self, messages: Tensor, part_length: int) -> tuple[Tensor, ...]:
        """Return where the scales, the codes of groups and of numbers are; the last are missing."""
        group = self._format.group
        scales, groups = (
            4 * -(-part_length // self._size),
            4 * -(-part_length // (4 * group)) if group else 0,
        )
        return torch.split(messages, [scales, groups, messages.size(-1) - scales - groups], dim=-1)


def _select(rows: Tensor, codes: Tensor) -> Tensor:
    return rows.index_select(0, codes.view(-1).int())


def packed_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, one per byte, into ``bits`` bits each, lowest bits first."""
    while bits < 8:
        codes = codes[::2] | codes[1::2] << bits
        bits *= 2
    return codes


def _norm_of(norm: str, y: Tensor, largest: Tensor, counts: Tensor) -> Tensor:
    if norm == "LARGEST":
        return largest
    if norm == "SIGNED":
        return torch.where(y.amax(1, keepdim=True) == largest, largest, -largest)
    ratios = y * largest.reciprocal()
    total = _sums(ratios.abs() if norm == "MEAN" else ratios * ratios).double()
    mean = total if norm == "EUCLIDEAN" else total / counts
    return (largest.double() * (mean if norm == "MEAN" else mean.sqrt())).float()


def _sums(terms: Tensor) -> Tensor:
    """Return the sum over each block, (blocks, 1): Note [Order of sums] in block.h."""
    blocks, size = terms.shape
    padded = max(1 << (size - 1).bit_length(), _TILE)
    sums = pad(terms, (0, padded - size)) if padded > size else terms
    for length in (min(padded, _CHUNK), max(padded // _CHUNK, 1)):
        sums = sums.reshape(blocks, -1, length)
        while sums.size(2) > 1:
            one, other = sums.chunk(2, dim=2)
            sums = one + other
    return sums[:, :, 0]


# -------------------------------------------------------------------------------- random numbers


def word(value: int, bits: int = 32) -> int:
    """Return the signed integer with the lowest bits of ``value``."""
    value %= 2**bits
    return value - (value >> (bits - 1) << bits)


def random_bits(indices: Tensor, low: Tensor | int, high: Tensor | int) -> Tensor:
    """Return 32 random bits per index, int32, for the seed whose words are ``low`` and ``high``."""
    bits = (indices * word(0x9E3779B1)).add_(low)
    bits ^= bits >> 16 & 0xFFFF  # a shift copies the sign
    bits = bits.mul_(word(0x85EBCA6B)).bitwise_xor_(high)
    bits ^= bits >> 13 & 0x7FFFF
    bits *= word(0xC2B2AE35)
    return bits.bitwise_xor_(bits >> 16 & 0xFFFF)


class BlockRandom:
    """The random numbers of several blocks, in the shape (blocks, block_size).

    ``first`` is the index of the first number of the first block.
    """

    def __init__(self, seed: int, first: int, blocks: int, block_size: int) -> None:
        starts = torch.arange(blocks)[:, None] * block_size + first
        seeds = (starts >> 32) * word(0x9E3779B97F4A7C15, 64) + word(seed, 64)
        self._low, self._high = seeds.int(), (seeds >> 32).int()
        self._indices = starts.int() + torch.arange(block_size, dtype=torch.int32)

    def bits(self) -> Tensor:
        """Return 32 bits per number."""
        return random_bits(self._indices, self._low, self._high)

    def coins(self) -> Tensor:
        """Return 0 or 1 per number."""
        return (self._indices * word(0x9E3779B1) + self._low) >> 31 & 1

    def uniform(self) -> Tensor:
        """Return a multiple of 2^-24 in [0, 1) per number."""
        return (self.bits() >> 8 & 0xFFFFFF).float().mul_(2.0**-24)


# ------------------------------------------------------------------------- rounding and rotation


def round_stochastically(values: Tensor, scale: float, out: Tensor, seed: int) -> None:
    """Set out, bfloat16, to scale * values, rounded at random to one of the two neighbors."""
    warn_once()
    bits = (values.detach() * scale).view(torch.int32)
    random = BlockRandom(seed, 0, 1, values.numel()).bits().view(-1)
    rounded = (bits + (random >> 16 & 0xFFFF)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    truncated = torch.where(is_nan, 0x40, 0) | bits >> 16
    found = torch.where((rounded & 0x7F80) == 0x7F80, truncated, rounded)
    out.view(torch.int16).copy_(found)


def rotate(values: Tensor, added: Tensor | None, part_length: int, inverse: bool) -> None:
    """Set values to the rotation of values + added, part by part; with inverse, rotate back."""
    warn_once()
    values = values.detach()
    if added is not None:
        values += added.detach()
    for part in torch.split(values, part_length):
        hashes = torch.arange(part.numel(), dtype=torch.int32) * word(0x9E3779B1)
        hashes = (hashes ^ hashes >> 15 & 0x1FFFF) * word(0x85EBCA77)
        signs = torch.where(hashes < 0, -1, 1).to(part.dtype)
        if not inverse:
            part *= signs
        size, start = _ROTATION, 0
        while size:  # whole blocks, and the rest in smaller ones
            stop = part.numel() // size * size
            _rotate_blocks(part[start:stop].view(-1, size))
            size, start = size // 2, stop
        if inverse:
            part *= signs


def _rotate_blocks(blocks: Tensor) -> None:
    """Multiply each row by the Hadamard matrix over the root of its length, in place."""
    size, half = blocks.size(1), 1
    while half < size:
        one, other = blocks.view(len(blocks), size // (2 * half), 2, half).unbind(2)
        sums = one + other
        other.neg_().add_(one)  # one - other
        one.copy_(sums)
        half *= 2
    blocks *= math.sqrt(1 / size)
