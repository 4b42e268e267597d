"""The shape of the one matrix that a whole bucket is seen as.

A gradient of low rank, cut into rows of another length, is a matrix of high rank: its rows begin
somewhere else in each of the new ones. Where one length divides the other they begin in few places,
so the rank grows little. So rows get the length that suits most of the bucket's elements among
those that are nearly the side of a square; a matrix is cheapest to send as factors if it is square.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from commhooks.algorithms.lowrank.matrix_shape import matrix_shape

__all__ = ["shape_of_bucket"]

# How much longer or shorter than the side of a square: n + m is at most 1.06 times the square's.
_RANGE = math.sqrt(2)


def shape_of_bucket(gradients: Iterable[Tensor]) -> tuple[int, int]:
    """(n, m), of which fewer than m of the elements are left over."""
    gradients = list(gradients)
    numel = sum(gradient.numel() for gradient in gradients)
    if numel == 0:
        return 0, 0
    columns = _columns(math.isqrt(numel), gradients)
    return numel // columns, columns


def _columns(side: int, gradients: Sequence[Tensor]) -> int:
    elements: Counter[int] = Counter()  # by the length of the rows that they are in
    for gradient in gradients:
        if shape := matrix_shape(gradient):
            elements[shape[1]] += gradient.numel()
    low, high = math.ceil(side / _RANGE), math.floor(side * _RANGE)
    candidates = {side}.union(*(_suitable(length, low, high) for length in elements))

    def suits(columns: int) -> tuple[int, float]:
        suited = (n for length, n in elements.items() if _is_aligned(length, columns))
        return sum(suited), -abs(math.log(columns / side))

    return max(sorted(candidates), key=suits)


def _suitable(length: int, low: int, high: int) -> Iterator[int]:
    """The multiples and the divisors of a length that are not below ``low`` or above ``high``."""
    yield from range(-(-low // length) * length, high + 1, length)
    for parts in range(-(-length // high), length // low + 1):
        if length % parts == 0:
            yield length // parts


def _is_aligned(length: int, columns: int) -> bool:
    return columns % length == 0 or length % columns == 0
