"""What low-rank compression puts on the wire at once: factors, and whatever is sent as it is."""

import torch
from torch import Tensor

from commhooks.algorithms.matrix_plan import MatrixPlan, Side

__all__ = ["Payload"]


class Payload:
    """One flat tensor, and its parts.

    ::

        flat      | factors of batch 0 | factors of batch 1 | ... | range 0 | range 1 | ...
                    (k, n, r) or (k, r, m), see `Side`              only if ``has_exact``
    """

    def __init__(self, plan: MatrixPlan, side: Side, flat: Tensor) -> None:
        self.plan = plan
        self.side = side
        self.flat = flat
        shapes = [batch.factor_shape(side) for batch in plan.batches]
        *factors, self._exact = torch.split(
            flat, [k * i * j for k, i, j in shapes] + [flat.numel() - plan.factor_elements(side)]
        )
        self.factors = [part.view(shape) for part, shape in zip(factors, shapes, strict=True)]

    @classmethod
    def empty(cls, plan: MatrixPlan, side: Side, *, has_exact: bool, like: Tensor) -> "Payload":
        elements = plan.factor_elements(side) + (plan.exact_elements if has_exact else 0)
        return cls(plan, side, like.new_empty(elements))

    def load_exact(self, buffer: Tensor) -> None:
        """Copies the exact ranges in from the bucket's buffer."""
        for part, (start, stop) in zip(self._exact_parts(), self.plan.exact, strict=True):
            part.copy_(buffer[start:stop])

    def store_exact(self, buffer: Tensor) -> None:
        """Copies the exact ranges out to the bucket's buffer."""
        for part, (start, stop) in zip(self._exact_parts(), self.plan.exact, strict=True):
            buffer[start:stop] = part

    def poison_overflow(self) -> None:
        """Makes NaN of numbers so large that products with them could overflow on one rank only."""
        largest = torch.finfo(self.flat.dtype).max / 2**16
        self.flat.masked_fill_(self.flat.abs() > largest, torch.nan)

    def _exact_parts(self) -> tuple[Tensor, ...]:
        return torch.split(self._exact, [stop - start for start, stop in self.plan.exact])
