"""PowerSGD on the whole bucket as one matrix, which is faster and less accurate. See powersgd.py."""

from dataclasses import dataclass

from commhooks.algorithms.matrix_plan import MatrixPlan
from commhooks.algorithms.powersgd import PowerSGD
from commhooks.registry import register_hook
from reducer import GradBucket

__all__ = ["BatchedPowerSGD"]


@register_hook("batched_powersgd")
@dataclass
class BatchedPowerSGD(PowerSGD):
    """Average each bucket through factors of low rank of one matrix, as square as the bucket allows.

    The matrix runs across parameters, so it has less structure to be found than the parameters' own
    matrices: use a higher rank, or prefer ``powersgd`` where accuracy counts. It compresses vectors
    as well, costs two products per bucket, and sends the least: about 2·r·√N of N elements.

    The factors belong to the bucket's composition: when buckets are cut anew they begin anew, while
    errors stay with their parameters.
    """

    def _plan(self, bucket: GradBucket) -> MatrixPlan:
        return MatrixPlan.of_bucket(bucket.key, bucket.names, bucket.lengths, self._rule())
