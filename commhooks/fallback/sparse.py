"""Arithmetic of sparse hooks on a CPU, as in csrc/sparse/selection.h and csrc/sparse/indices.h."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.fallback.blocks import packed_bits, random_bits, warn_once, word

_WORD_BITS = 64


def select_largest(gradient: Tensor, error: Tensor | None, count: int) -> Tensor:
    """Add error to gradient; return the indices of ``count`` largest magnitudes, equal ones first.

    Infinities and NaN count as larger than all numbers.
    """
    keys = _keys_of_sum(gradient, error)
    if not 0 < count < keys.numel():
        return torch.arange(min(count, keys.numel()), dtype=torch.int32)
    # A histogram of the upper 16 bits narrows the search.
    upper = keys >> (torch.iinfo(keys.dtype).bits - 17)
    at_least = upper.bincount().flip(0).cumsum(0)
    found = _where(upper >= at_least.numel() - 1 - (at_least < count).sum())
    return found[_largest(keys[None, found], count)].int()


def select_largest_of_chunks(
    gradient: Tensor, error: Tensor | None, chunk: int, count: int
) -> Tensor:
    """Add error to gradient; select ``count`` of each ``chunk`` elements as select_largest does."""
    keys = _keys_of_sum(gradient, error)
    return _largest(pad(keys, (0, -keys.numel() % chunk), value=-1).view(-1, chunk), count).int()


def select_above(gradient: Tensor, error: Tensor | None, threshold: float) -> Tensor:
    """Add error to gradient; return the indices of magnitudes of at least ``threshold``."""
    bound = _keys(torch.tensor(threshold, dtype=gradient.dtype)).clamp(min=1)
    return _where(_keys_of_sum(gradient, error) >= bound).int()


def _largest(keys: Tensor, count: int) -> Tensor:
    """Return the positions of ``count`` keys of each row. Keys below zero are of no element."""
    smallest = keys.topk(min(count, keys.size(1)), dim=1, sorted=False).values.amin(1, keepdim=True)
    is_found = keys >= smallest.clamp(min=0)
    if (is_found.sum(1) > count).any():  # of equal ones, keep the first
        is_larger = keys > smallest
        missing = count - is_larger.sum(1, keepdim=True)
        is_found &= is_larger | (is_found.cumsum(1) - is_larger.cumsum(1) <= missing)
    return _where(is_found.view(-1))


def _where(condition: Tensor) -> Tensor:
    return condition.nonzero().view(-1)


def _keys_of_sum(gradient: Tensor, error: Tensor | None) -> Tensor:
    """Add error to gradient, and return the bits of the magnitudes."""
    warn_once()
    if error is not None:
        gradient.detach().add_(error.detach())
    return _keys(gradient.detach())


def _keys(numbers: Tensor) -> Tensor:
    """Return the bits of |number|. They are ordered as the numbers, infinity and NaN last."""
    bits = torch.int32 if numbers.dtype == torch.float32 else torch.int64
    return numbers.view(bits) & torch.iinfo(bits).max


def pack_indices(
    indices: Tensor, high_bits: int, low_bits: int, adds_ordinal: bool, out: Tensor
) -> None:
    """Write ascending indices as a bitmap and low bits: Note [Index code] in codecs/index_code."""
    numbers, ordinals = indices.long(), torch.arange(indices.numel())
    _check_range(indices, (high_bits - adds_ordinal * (indices.numel() - 1)) << low_bits)
    bitmap = torch.zeros(_whole_words(high_bits), dtype=torch.uint8)
    bitmap[(numbers >> low_bits) + ordinals * adds_ordinal] = 1
    fields = torch.zeros(_whole_words(indices.numel() * low_bits), dtype=torch.uint8)
    low = numbers[:, None] >> torch.arange(low_bits) & 1
    fields[: low.numel()] = low.view(-1)
    out.copy_(packed_bits(torch.cat([bitmap, fields]), 1))


def unpack_indices(
    packed: Tensor, high_bits: int, low_bits: int, adds_ordinal: bool, numel: int, out: Tensor
) -> None:
    """Read what pack_indices wrote, and check it."""
    count = out.numel()
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1)
    indices = _where(bits[: _whole_words(high_bits)])
    fields = bits[_whole_words(high_bits) :]
    is_complete = indices.numel() == count
    if is_complete:
        indices = indices - torch.arange(count) * adds_ordinal
        low = fields[: count * low_bits].view(count, low_bits).long() << torch.arange(low_bits)
        indices = indices << low_bits | low.sum(1)
        out.copy_(indices)
        bounded = torch.cat([torch.tensor([-1]), indices, torch.tensor([numel])])
        is_complete = bool((bounded.diff() > 0).all()) or count == 0
    if not is_complete:
        raise RuntimeError(
            f"Expected {count} ascending indices below {numel} in a message: it is corrupted, or "
            "ranks have different options."
        )


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Add values to out at ascending indices."""
    _check_range(indices, out.numel())
    out.detach().index_add_(0, indices, values.detach())


def draw_indices(seed: int, rotation: int, numel: int, out: Tensor) -> None:
    """Fill out with distinct, ascending indices: RandomIndices in kernels/codecs/sparse.h."""
    count = out.numel()

    def draw(runs: Tensor) -> Tensor:
        """Return the index drawn from each run, after the rotation."""
        begins, ends = runs * numel // count, (runs + 1) * numel // count
        bits = random_bits(runs.int(), word(seed), word(seed >> 32)).long() & 0xFFFFFFFF
        return begins + (bits * (ends - begins) >> 32) + rotation

    if count > 0:
        first = 0
        if rotation > 0:
            first = (numel - rotation) * count // numel
            first += int(draw(torch.tensor([first])) < numel)
        out.copy_(draw((torch.arange(count) + first) % count) % numel)


def _check_range(indices: Tensor, numel: int) -> None:
    ends = indices[:: max(indices.numel() - 1, 1)].tolist()  # numel may be beyond their dtype
    if ends and not 0 <= ends[0] <= ends[-1] < numel:
        raise RuntimeError(f"Expected indices below {numel}, found {ends}.")


def _whole_words(bits: int) -> int:
    """Return ``bits``, rounded up to whole words."""
    return -(-bits // _WORD_BITS) * _WORD_BITS
