"""PowerSGD on a whole bucket as one matrix, which sends less and is less accurate.

The method and its reasons are in algorithms/lowrank/powersgd.py; here is the shape of the matrix.

Note [Rows of a bucket]
~~~~~~~~~~~~~~~~~~~~~~~
If a gradient of low rank is divided into rows of another length, its rows begin at other columns in
each row of the new matrix, which has a high rank then. If one length divides the other, they begin
at few columns, so the rank grows little. A matrix is cheapest to send as factors if it is square.
So rows get the length that suits most of the bucket's elements, among the lengths that are near the
side of a square.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from commhooks.algorithms.bucket_parameters import real_view
from commhooks.algorithms.lowrank.compressor import Compressor
from commhooks.algorithms.lowrank.matrix_plan import MatrixBatch, MatrixPlan, RankRule, matrix_shape
from commhooks.algorithms.lowrank.powersgd import PowerSGD
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from reducer import GradBucket

# How much longer or shorter than the side of a square: n + m is at most 1.06 times the square's.
_RANGE = math.sqrt(2)


@register_hook("batched_powersgd")
@dataclass
class BatchedPowerSGD(PowerSGD):
    """Average each bucket through factors of low rank, as one matrix that is nearly square.

    The matrix runs across parameters, so it has less structure than the parameters' own matrices,
    hence the higher rank; prefer ``powersgd`` where accuracy counts. It compresses vectors as well
    and sends about 2·r·√N of N elements. See docs/hooks/batched_powersgd.md
    for what is lost at which rank.

    Factors belong to the composition of a bucket: when buckets are rebuilt, factors start from
    random numbers again, while errors stay with their parameters.
    """

    rank: Annotated[int, Limits(ge=1)] = 16
    """r. Higher: closer to the average, more bytes."""

    def _matrices(self, parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """Return the matrix that allows the highest rank that any bucket can have."""
        side = math.isqrt(sum(real_view(parameter).numel() for parameter in parameters.values()))
        return {"all parameters in one bucket": (side, side)}

    def _plan(self, bucket: GradBucket) -> MatrixPlan:
        return plan_of_bucket(bucket.key, bucket.names, bucket.gradients(), self.rank_of)

    def _make_compressor(self, bucket: GradBucket) -> Compressor:
        """Begin with random factors if those of a loaded state have other shapes.

        A state does not tell the shape of a bucket, so loading cannot detect this. Factors are the
        same on all ranks, so all ranks make the same choice.
        """
        batches = self._plan(bucket).batches
        fields = [f for b in batches for f in self.factor_fields(b.rows, b.columns, b.rank)]
        kept = self.state.get(bucket.key, {})
        if {name: tuple(kept[name].shape) for name in kept} != {f.name: f.shape for f in fields}:
            self.state.pop(bucket.key, None)
        return super()._make_compressor(bucket)

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return self.error_fields(gradient.numel())

    def bucket_fields(self) -> Sequence[StateField]:
        return self.factor_fields(None, None, None)


def plan_of_bucket(
    key: str, names: Sequence[str], gradients: Sequence[Tensor], rank_of: RankRule
) -> MatrixPlan:
    """Compress the whole bucket as one matrix, nearly square.

    Fewer than m of the N elements are left over. Sending these uncompressed costs no more than the
    row of zeros that would make room for them, and no copy.
    """
    numel = sum(gradient.numel() for gradient in gradients)
    columns = _columns(gradients) if numel > 0 else 1
    rows = numel // columns
    rank = rank_of(rows, columns)
    if rank == 0:
        return MatrixPlan((), ((0, numel),) if numel > 0 else (), ())
    size = rows * columns
    batch = MatrixBatch(0, size, rows, columns, rank, (key,))
    errors = ((name, (g.numel(),)) for name, g in zip(names, gradients, strict=True))
    return MatrixPlan((batch,), ((size, numel),) if size < numel else (), tuple(errors))


def _columns(gradients: Sequence[Tensor]) -> int:
    """Choose the length of rows. See Note [Rows of a bucket]."""
    side = math.isqrt(sum(gradient.numel() for gradient in gradients))
    elements: Counter[int] = Counter()  # by the length of the rows that they are in
    for gradient in gradients:
        if shape := matrix_shape(gradient):
            elements[shape[1]] += gradient.numel()
    low, high = math.ceil(side / _RANGE), math.floor(side * _RANGE)
    candidates = {side}.union(*(_multiples_and_divisors(n, low, high) for n in elements))

    def suits(columns: int) -> tuple[int, float]:
        suited = (
            count
            for length, count in elements.items()
            if columns % length == 0 or length % columns == 0
        )
        return sum(suited), -abs(math.log(columns / side))

    return max(sorted(candidates), key=suits)


def _multiples_and_divisors(length: int, low: int, high: int) -> Iterator[int]:
    """Yield the multiples and the divisors of a length from ``low`` to ``high``."""
    yield from range(-(-low // length) * length, high + 1, length)
    for parts in range(-(-length // high), length // low + 1):
        if length % parts == 0:
            yield length // parts
