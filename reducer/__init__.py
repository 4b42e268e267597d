"""The engine: it packs gradients into buckets, calls a communication hook and unpacks the result.

It contains no algorithm; :mod:`commhooks` does.

Imports: nothing of ``commhooks``.
"""

import torch  # noqa: F401  (loads the libraries that the compiled module links to)

from reducer.extension import explained

with explained():
    from reducer._C import GradBucket, Reducer

from reducer.distributed import DistributedDataParallel
from reducer.mixed_precision import MixedPrecision
from reducer.optim import OverlappedOptimizer, overlap_optimizer

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "OverlappedOptimizer",
    "Reducer",
    "overlap_optimizer",
]
