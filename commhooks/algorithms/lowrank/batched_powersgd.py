"""PowerSGD on a whole bucket as one matrix, which sends less and is less accurate.

See algorithms/lowrank/powersgd.py for the method and the reasons.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from commhooks.algorithms.bucket_parameters import real_view
from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan
from commhooks.algorithms.lowrank.powersgd import PowerSGD
from commhooks.hook.options import Ge
from commhooks.hook.registry import register_hook
from reducer import GradBucket

__all__ = ["BatchedPowerSGD"]


@register_hook("batched_powersgd")
@dataclass
class BatchedPowerSGD(PowerSGD):
    """Average each bucket through factors of low rank, as one matrix that is nearly square.

    The matrix runs across parameters, so there is less structure to be found in it than in the
    parameters' own matrices, hence the higher rank; prefer ``powersgd`` where accuracy counts. It
    compresses vectors as well and sends about 2·r·√N of N elements.

    How much is lost at which rank is in docs/hooks/powersgd.md.

    The factors belong to the bucket's composition: when buckets are cut anew they begin anew, while
    errors stay with their parameters.
    """

    rank: Annotated[int, Ge(1)] = 16
    """r. Higher: closer to the average, more bytes."""

    def _matrices(self, parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """That which allows the highest rank that any bucket can have."""
        side = math.isqrt(sum(real_view(parameter).numel() for parameter in parameters.values()))
        return {"all parameters in one bucket": (side, side)}

    def _plan(self, bucket: GradBucket) -> MatrixPlan:
        return MatrixPlan.of_bucket(bucket.key, bucket.names, bucket.gradients(), self._rule())

    def knows_state_key(self, key: str, parameters: Mapping[str, Tensor]) -> bool:
        """Names of parameters, which have errors, and keys of buckets, which have factors."""
        return key in parameters or re.fullmatch("[0-9a-f]{16}", key) is not None
