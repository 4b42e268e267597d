"""Tensors of numbers to messages and back, and their rotation: csrc/codecs/block_codec.h."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from commhooks.fallback.codes import BlockRandom, Floats, codes_named, find_scales
from commhooks.fallback.warning import warn_once

_MOST_NUMBERS = 1 << 14  # at a time: what is computed from them stays in caches and in the heap

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class CpuBlockCodec:
    """Encodes numbers as blocks of codes with one float32 scale each."""

    def __init__(
        self, codes: str, norm: int, levels: float, clip: float, is_vote: bool, block_size: int
    ) -> None:
        self._codes = codes_named(codes, norm, levels, clip)
        self._block_size = block_size
        self._is_vote = is_vote
        every = np.arange(2**self._codes.bits, dtype=np.uint32)
        self._values = self._codes.decode(every)
        bytes_ = np.arange(256, dtype=np.uint8)
        # Row i has the numbers of the codes in byte i.
        self._values_of_byte = self._values[_unpacked(bytes_, self._codes.bits)]

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
        numbers, errors = _array(values), None if error is None else _array(error)
        with np.errstate(all="ignore"):
            for part, message in enumerate(messages.numpy()):
                whole = slice(part * part_length, (part + 1) * part_length)
                for first, tile in self._tiles(whole, numbers.size):
                    y = numbers[tile] if errors is None else numbers[tile] + errors[tile]
                    block = (first - whole.start) // self._block_size
                    codes, scales = self._encode_tile(y, message, part_length, block, seed, first)
                    if keep_residual:
                        decoded = self._values.take(codes, mode="wrap") * scales
                        rest = decoded.ravel()[: y.size]
                        np.subtract(y, rest, out=numbers[tile], dtype=y.dtype)

    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        """Write the mean of the messages to values."""
        warn_once()
        self._decode(list(messages.numpy()), _array(values), part_length)

    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, kept: Tensor | None
    ) -> bool:
        """Decode the messages of all parts; return whether they are finite."""
        warn_once()
        scales = messages.numpy()[:, : 4 * self._blocks(part_length)]
        if not np.isfinite(np.ascontiguousarray(scales).view(np.float32)).all():
            values.fill_(math.nan)
            return False
        if kept is not None:
            kept.copy_(values)
        numbers = _array(values)
        for part, message in enumerate(messages.numpy()):
            whole = slice(part * part_length, (part + 1) * part_length)
            self._decode([message], numbers[whole], part_length)
        return True

    def _encode_tile(
        self, numbers: Array, message: Bytes, part_length: int, block: int, seed: int, first: int
    ) -> tuple[Bytes, Floats]:
        """Write and return the codes and scales of the blocks from ``block`` on.

        ``first`` is the index of the first number among all parts. What is returned has zeros for
        blocks without a scale.
        """
        size, bits = self._block_size, self._codes.bits
        blocks = min(self._blocks_at_once, self._blocks(part_length) - block)
        y = np.zeros((blocks, size), np.float32)
        y.ravel()[: numbers.size] = numbers
        counts = np.clip(numbers.size - size * np.arange(blocks), 0, size)
        scales, has_scale = find_scales(self._codes, y, counts)
        random = BlockRandom(seed, first, blocks, size)
        ratios = y * (np.float32(1) / scales)
        factors = np.where(has_scale, scales, np.float32(0))
        if self._codes.group:
            room = self._groups_of(message, part_length, block)
            ratios, factors = self._encode_groups(y, scales, factors, numbers.size, room)
        codes = self._codes.encode(ratios, random).astype(np.uint8)
        if not has_scale.all():
            codes *= has_scale
        codes.ravel()[numbers.size :] = 0
        message[4 * block : 4 * (block + blocks)] = scales.view(np.uint8).ravel()
        room = message[self._codes_offset(part_length, block) :][: blocks * size * bits // 8]
        room[:] = _packed(codes, bits)[: room.size]
        return codes, factors

    def _encode_groups(
        self, y: Floats, scales: Floats, factors: Floats, count: int, room: Bytes
    ) -> tuple[Floats, Floats]:
        """Write the codes of the groups of blocks to ``room``, with zeros after the last number.

        Return the numbers over the scales of their groups, and these scales, (blocks, block_size).
        """
        codes, inverses = self._codes, np.float32(1) / scales
        largest = np.abs(y).reshape(len(y), -1, codes.group).max(axis=2)
        of_groups = codes.group_codes(largest * inverses)
        of_groups[np.broadcast_to(factors == 0, of_groups.shape)] = 0
        of_groups.ravel()[-(-count // codes.group) :] = 0
        room = room[: of_groups.size]
        room[:] = of_groups.ravel()[: room.size]
        group_scales = codes.group_scales(of_groups)
        divisors = group_scales.copy()
        divisors[divisors == 0] = 1
        group_inverses = inverses / divisors
        ratios: Floats = y * group_inverses.repeat(codes.group, axis=1)
        return ratios, (group_scales * factors).repeat(codes.group, axis=1)

    def _decode(self, messages: Sequence[Bytes], values: Array, part_length: int) -> None:
        """Write the mean, or the vote, of messages of one part to values."""
        with np.errstate(all="ignore"):
            for first, tile in self._tiles(slice(0, part_length), values.size):
                if values[tile].size:
                    block = first // self._block_size
                    sums = self._sum_tile(messages, values[tile].size, part_length, block)
                    values[tile] = sums.ravel()[: values[tile].size]

    def _sum_tile(
        self, messages: Sequence[Bytes], count: int, part_length: int, block: int
    ) -> Floats:
        size, bits = self._block_size, self._codes.bits
        blocks = self._blocks(count)
        share = np.float32(1) / np.float32(len(messages))
        mean_scale = np.zeros((blocks, 1), np.float32)
        sums: Floats | None = None
        for message in messages:
            scales = message[4 * block : 4 * (block + blocks)].view(np.float32)[:, None]
            weights = scales * share
            mean_scale += weights
            if self._is_vote:
                weights = (scales != 0).astype(np.float32)
            begin = self._codes_offset(part_length, block)
            packed = np.zeros(blocks * size * bits // 8, np.uint8)
            found = message[begin : begin + packed.size]
            packed[: found.size] = found
            terms = self._values_of_byte.take(packed, axis=0, mode="wrap").reshape(blocks, size)
            if self._codes.group:
                weights = self._weights_of_numbers(message, weights, part_length, block)
            terms *= weights
            sums = terms if sums is None else np.add(sums, terms, out=sums)
        assert sums is not None
        if self._is_vote:
            sums = np.clip(sums, np.float32(-1), np.float32(1)) * mean_scale
        return sums

    def _weights_of_numbers(
        self, message: Bytes, weights: Floats, part_length: int, block: int
    ) -> Floats:
        groups = np.zeros(len(weights) * self._block_size // self._codes.group, np.uint8)
        found = self._groups_of(message, part_length, block)[: groups.size]
        groups[: found.size] = found
        scales = self._codes.group_scales(groups.astype(np.uint32)).reshape(len(weights), -1)
        return (scales * weights).repeat(self._codes.group, axis=1)

    def _tiles(self, part: slice, numel: int) -> Iterator[tuple[int, slice]]:
        """Yield the index of the first number and the range of the numbers of whole blocks."""
        step = self._blocks_at_once * self._block_size
        for first in range(part.start, part.stop, step):
            yield first, slice(min(first, numel), min(first + step, part.stop, numel))

    @property
    def _blocks_at_once(self) -> int:
        return max(1, _MOST_NUMBERS // self._block_size)

    def _blocks(self, count: int) -> int:
        return -(-count // self._block_size)

    def _groups_of(self, message: Bytes, part_length: int, block: int) -> Bytes:
        """Return the scales of the groups from a block on."""
        begin = 4 * self._blocks(part_length) + block * self._block_size // self._codes.group
        return message[begin : self._codes_offset(part_length, 0)]

    def _codes_offset(self, part_length: int, block: int) -> int:
        begin = 4 * self._blocks(part_length)
        if self._codes.group:
            begin += 4 * -(-part_length // (4 * self._codes.group))
        return begin + block * self._block_size * self._codes.bits // 8


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().numpy()
    return array


def _packed(codes: Bytes, bits: int) -> Bytes:
    """Pack codes, one per byte, into ``bits`` bits each, lowest bits first."""
    if bits == 1:
        return np.packbits(codes, axis=None, bitorder="little")
    codes = codes.ravel()
    while bits < 8:
        codes = codes[::2] | codes[1::2] << np.uint8(bits)
        bits *= 2
    return codes


def _unpacked(packed: Bytes, bits: int) -> Bytes:
    """Return the codes of each byte, (bytes, 8 / bits)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Bytes = (packed[:, None] >> shifts) & np.uint8(2**bits - 1)
    return codes


# ---------------------------------------------------------------------------------- the rotation

_ROTATION = 128


def rotate(values: Tensor, added: Tensor | None, part_length: int, inverse: bool) -> None:
    """Set values to the rotation of values + added, part by part; with inverse, rotate back."""
    warn_once()
    numbers: Array = values.detach().numpy()
    if added is not None:
        numbers += added.detach().numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # then the scale is NaN
        for start in range(0, numbers.size, part_length):
            _rotate_part(numbers[start : start + part_length], inverse=inverse)


def _rotate_part(part: Array, *, inverse: bool) -> None:
    changes = _signs(part.size)
    if not inverse:
        np.negative(part, out=part, where=changes)
    start = part.size // _ROTATION * _ROTATION
    _rotate_blocks(part[:start].reshape(-1, _ROTATION))
    size = _ROTATION // 2
    while size:
        if part.size & size:
            _rotate_blocks(part[start : start + size].reshape(1, size))
            start += size
        size //= 2
    if inverse:
        np.negative(part, out=part, where=changes)


def _rotate_blocks(blocks: Array) -> None:
    """Multiply each row by the Hadamard matrix over the root of its length, in place."""
    count, size = blocks.shape
    half = 1
    while half < size:
        pairs = blocks.reshape(count, size // (2 * half), 2, half)
        sums = pairs[:, :, 0] + pairs[:, :, 1]
        pairs[:, :, 1] = pairs[:, :, 0] - pairs[:, :, 1]
        pairs[:, :, 0] = sums
        half *= 2
    blocks *= blocks.dtype.type(_factor(size))


def _factor(size: int) -> float:
    """Return 1 / √size of a power of two."""
    halvings, is_odd = divmod(size.bit_length() - 1, 2)
    return 0.5**halvings * (math.sqrt(0.5) if is_odd else 1.0)


def _signs(count: int) -> npt.NDArray[np.bool_]:
    """Return which of the numbers of a part change their signs."""
    hashes = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1)
    hashes ^= hashes >> np.uint32(15)
    hashes *= np.uint32(0x85EBCA77)
    return hashes >= np.uint32(0x80000000)
