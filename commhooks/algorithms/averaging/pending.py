"""Results of exchanges that take several steps, by parameter name."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from commhooks.comm.exchange import Exchange
from reducer import GradBucket

__all__ = ["Pending", "pending_of"]


@dataclass(frozen=True)
class Pending:
    """The part of one parameter in what an exchange returns for a bucket.

    It does not refer to the bucket, because buckets may be rebuilt before the result is taken.
    """

    exchange: Exchange
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def finished(cls, result: Tensor) -> "Pending":
        """Return one that is over, for a result from a saved state or to begin with."""
        return cls(Exchange.finished(result), tuple(result.shape), result.stride(), 0)

    def result(self) -> Tensor:
        """Return the result of an exchange that is over, see :meth:`Exchange.result`."""
        flat = self.exchange.result()
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


def pending_of(exchange: Exchange, bucket: GradBucket) -> dict[str, Pending]:
    """Return the parts of all parameters of a bucket, whose average the exchange returns."""
    views: Sequence[Tensor] = bucket.gradients()
    return {
        name: Pending(exchange, tuple(view.shape), view.stride(), offset)
        for name, view, offset in zip(bucket.names, views, bucket.offsets, strict=True)
    }
