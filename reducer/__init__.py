"""The engine: gradients are bucketed, handed to a communication hook and written back.

It knows nothing of any algorithm; see :mod:`commhooks` for those.
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
