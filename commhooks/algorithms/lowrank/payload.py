"""What low-rank compression puts on the wire at once: factors, and whatever is sent as it is."""

from functools import cached_property

import torch
from torch import Tensor

from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan, Side

__all__ = ["Payload"]


class Payload:
    """One flat tensor, and its parts.

    ::

        flat      | factors of batch 0 | factors of batch 1 | ... | range 0 | range 1 | ... | spare
                    (k, n, r) or (k, r, m), see `Side`              only if ``has_exact``

    ``spare``: elements that are not sent.
    """

    def __init__(self, plan: MatrixPlan, side: Side, flat: Tensor, *, has_exact: bool) -> None:
        self.plan = plan
        self.side = side
        self.flat = flat
        self.has_exact = has_exact

    @classmethod
    def empty(
        cls, plan: MatrixPlan, side: Side, *, has_exact: bool, like: Tensor, spare: int = 0
    ) -> "Payload":
        elements = plan.sent_elements(side, has_exact=has_exact) + spare
        return cls(plan, side, like.new_empty(elements), has_exact=has_exact)

    @property
    def sent_elements(self) -> int:
        return self.plan.sent_elements(self.side, has_exact=self.has_exact)

    @cached_property
    def factors(self) -> list[Tensor]:
        """Those of each batch."""
        flat, places = self.flat, self.plan.factor_places[self.side]
        return [flat.as_strided(shape, strides, start) for shape, strides, start in places]

    @property
    def all_factors(self) -> Tensor:
        """Those of all batches, flat."""
        return self.flat[: self.plan.factor_elements(self.side)]

    @property
    def exact(self) -> Tensor:
        """The ranges, one after the other."""
        return self.flat[self.plan.factor_elements(self.side) : self.sent_elements]

    def load_exact(self, buffer: Tensor) -> None:
        """Copies the exact ranges in from the bucket's buffer."""
        if self.plan.exact:
            torch._foreach_copy_(self._split(self.exact), self.plan.exact_parts(buffer))

    def store_exact(self, exact: Tensor, buffer: Tensor) -> None:
        """Copies what became of the exact ranges out to the bucket's buffer."""
        if self.plan.exact:
            torch._foreach_copy_(self.plan.exact_parts(buffer), self._split(exact))

    def _split(self, exact: Tensor) -> tuple[Tensor, ...]:
        return exact.split_with_sizes(self.plan.exact_sizes)
