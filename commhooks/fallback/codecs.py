"""Tensors of numbers to messages and back, and their rotation: csrc/codecs/block_codec.h."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from commhooks.fallback.codes import BlockRandom, Floats, find_scales, format_named
from commhooks.fallback.warning import warn_once

_MOST_NUMBERS = 1 << 14  # at a time: what is computed from them stays in caches and in the heap

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class _Tile(NamedTuple):
    """Some blocks of a part."""

    part: int
    block: int
    """The first of the blocks."""
    blocks: int
    numbers: slice
    """Their numbers among those of all parts."""


class CpuBlockCodec:
    """Encodes numbers as blocks of codes with one float32 scale each."""

    def __init__(
        self, codes: str, norm: int, levels: float, clip: float, is_vote: bool, block_size: int
    ) -> None:
        self._format = format_named(codes, norm, levels, clip)
        self._block_size = block_size
        self._is_vote = is_vote
        # Row i has the numbers of the codes in byte i.
        shifts = np.arange(0, 8, self._format.bits)
        unpacked = np.arange(256)[:, None] >> shifts & 2**self._format.bits - 1
        self._values_of_byte = self._format.values[unpacked]

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
            for tile in self._tiles(part_length, len(messages), numbers.size):
                y = numbers[tile.numbers]
                if errors is not None:
                    y = y + errors[tile.numbers]
                rooms = self._rooms(messages.numpy()[tile.part], part_length, tile)
                first = tile.part * part_length + tile.block * self._block_size
                random = BlockRandom(seed, first, tile.blocks, self._block_size)
                codes, scales = self._encode_tile(y, rooms, random)
                if keep_residual:
                    decoded = self._format.values.take(codes, mode="wrap") * scales
                    decoded = decoded.ravel()[: y.size]
                    np.subtract(y, decoded, out=numbers[tile.numbers], dtype=y.dtype)

    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        """Write the mean of the messages to values."""
        self._decode(messages.numpy()[None], _array(values), part_length)

    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, kept: Tensor | None
    ) -> bool:
        """Decode the messages of all parts; return whether they are finite."""
        scales = messages.numpy()[:, : 4 * self._blocks(part_length)]
        if not np.isfinite(np.ascontiguousarray(scales).view(np.float32)).all():
            values.fill_(math.nan)
            return False
        if kept is not None:
            kept.copy_(values)
        self._decode(messages.numpy()[:, None], _array(values), part_length)
        return True

    def _encode_tile(
        self, numbers: Array, rooms: tuple[Bytes, Bytes, Bytes], random: BlockRandom
    ) -> tuple[Bytes, Floats]:
        """Write scales, scales of groups and codes of whole blocks; return codes and scales."""
        size, number_format = self._block_size, self._format
        scales_room, groups_room, codes_room = rooms
        y = np.zeros((scales_room.size // 4, size), np.float32)
        y.ravel()[: numbers.size] = numbers
        counts = np.clip(numbers.size - size * np.arange(len(y)), 0, size)[:, None]
        scales, has_scale = find_scales(number_format, y, counts)
        inverses, factors = np.float32(1) / scales, np.where(has_scale, scales, np.float32(0))
        if group := number_format.group:
            largest = np.abs(y).reshape(len(y), -1, group).max(axis=2)
            of_groups = number_format.group_codes(largest * inverses) * has_scale
            of_groups.ravel()[-(-numbers.size // group) :] = 0
            groups_room[:] = of_groups.ravel()[: groups_room.size]
            group_scales = number_format.group_scales[of_groups]
            inverses = (inverses / np.where(group_scales == 0, 1, group_scales)).repeat(group, 1)
            factors = (group_scales * factors).repeat(group, 1)
        codes = number_format.encode(y * inverses, random).astype(np.uint8)
        if not has_scale.all():
            codes *= has_scale
        codes.ravel()[numbers.size :] = 0
        scales_room[:] = scales.view(np.uint8).ravel()
        codes_room[:] = _packed(codes, number_format.bits)[: codes_room.size]
        return codes, factors

    def _decode(self, messages: Bytes, values: Array, part_length: int) -> None:
        """Write the mean, or the vote, of the messages, (parts, count, bytes), to values."""
        warn_once()
        with np.errstate(all="ignore"):
            for tile in self._tiles(part_length, len(messages), values.size):
                place = values[tile.numbers]
                if place.size:
                    place[:] = self._mean(messages[tile.part], part_length, tile)[: place.size]

    def _mean(self, messages: Bytes, part_length: int, tile: _Tile) -> Floats:
        blocks, size, number_format = tile.blocks, self._block_size, self._format
        share = np.float32(1) / np.float32(len(messages))
        mean_scale = np.zeros((blocks, 1), np.float32)
        sums = np.full((blocks, size), -0.0, np.float32)  # the neutral element of addition
        for message in messages:
            scales_room, groups_room, codes_room = self._rooms(message, part_length, tile)
            scales = scales_room.view(np.float32)[:, None]
            mean_scale += scales * share
            weights = (scales != 0).astype(np.float32) if self._is_vote else scales * share
            if group := number_format.group:
                of_groups = _padded(groups_room, blocks * size // group).reshape(blocks, -1)
                weights = (number_format.group_scales[of_groups] * weights).repeat(group, axis=1)
            packed = _padded(codes_room, blocks * size * number_format.bits // 8)
            terms = self._values_of_byte.take(packed, axis=0, mode="wrap").reshape(blocks, size)
            terms *= weights
            sums += terms
        if self._is_vote:
            sums = np.clip(sums, np.float32(-1), np.float32(1)) * mean_scale
        return sums.ravel()

    def _tiles(self, part_length: int, parts: int, numel: int) -> Iterator[_Tile]:
        """Yield the blocks of all parts, some at a time. The last numbers may be missing."""
        step, blocks = max(1, _MOST_NUMBERS // self._block_size), self._blocks(part_length)
        for part in range(parts):
            stop = min((part + 1) * part_length, numel)
            for block in range(0, blocks, step):
                start = part * part_length + block * self._block_size
                numbers = slice(min(start, stop), min(start + step * self._block_size, stop))
                yield _Tile(part, block, min(step, blocks - block), numbers)

    def _rooms(self, message: Bytes, part_length: int, tile: _Tile) -> tuple[Bytes, Bytes, Bytes]:
        """Return where the scales, the scales of groups and the codes of a tile are in a message.

        The last codes and scales of groups may be missing.
        """
        group = self._format.group
        groups_at = 4 * self._blocks(part_length)
        codes_at = groups_at + (4 * -(-part_length // (4 * group)) if group else 0)
        per_group = self._block_size // group if group else 0

        def room(begin: int, end: int, per_block: int) -> Bytes:
            first = min(begin + tile.block * per_block, end)
            return message[first : min(first + tile.blocks * per_block, end)]

        return (
            room(0, groups_at, 4),
            room(groups_at, codes_at, per_group),
            room(codes_at, message.size, self._block_size * self._format.bits // 8),
        )

    def _blocks(self, count: int) -> int:
        return -(-count // self._block_size)


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().numpy()
    return array


def _padded(found: Bytes, size: int) -> Bytes:
    """Return the bytes with zeros behind them."""
    return found if found.size == size else np.pad(found, (0, size - found.size))


def _packed(codes: Bytes, bits: int) -> Bytes:
    """Pack codes, one per byte, into ``bits`` bits each, lowest bits first."""
    if bits == 1:
        return np.packbits(codes, axis=None, bitorder="little")
    codes = codes.ravel()
    while bits < 8:
        codes = codes[::2] | codes[1::2] << np.uint8(bits)
        bits *= 2
    return codes


# ---------------------------------------------------------------------------------- the rotation

_ROTATION = 128


def rotate(values: Tensor, added: Tensor | None, part_length: int, inverse: bool) -> None:
    """Set values to the rotation of values + added, part by part; with inverse, rotate back."""
    warn_once()
    numbers = _array(values)
    if added is not None:
        numbers += _array(added)
    with np.errstate(over="ignore", invalid="ignore"):  # then the scale is NaN
        for start in range(0, numbers.size, part_length):
            _rotate_part(numbers[start : start + part_length], inverse=inverse)


def _rotate_part(part: Array, *, inverse: bool) -> None:
    hashes = np.arange(part.size, dtype=np.uint32) * np.uint32(0x9E3779B1)
    hashes ^= hashes >> np.uint32(15)
    hashes *= np.uint32(0x85EBCA77)
    changes_sign = hashes >= np.uint32(0x80000000)
    if not inverse:
        np.negative(part, out=part, where=changes_sign)
    size, start = _ROTATION, 0
    while size:  # whole blocks, and the rest in smaller ones
        stop = part.size // size * size
        _rotate_blocks(part[start:stop].reshape(-1, size))
        size, start = size // 2, stop
    if inverse:
        np.negative(part, out=part, where=changes_sign)


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
    blocks *= blocks.dtype.type(math.sqrt(1 / size))
