"""The engine: it packs gradients into buckets, calls a communication hook and unpacks the result.

It contains no algorithm; :mod:`commhooks` does.
"""

from reducer.extension import ENGINE, unavailable

try:
    ENGINE.load()
except ImportError as error:
    # `commhooks doctor` still runs. Not a plain `def`, or type checkers would think that the
    # package has any attribute.
    globals()["__getattr__"] = unavailable(error)
else:
    from reducer.distributed import DistributedDataParallel
    from reducer.mixed_precision import MixedPrecision
    from reducer.native import GradBucket, Reducer
    from reducer.optim import OverlappedOptimizer, overlap_optimizer

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "OverlappedOptimizer",
    "Reducer",
    "overlap_optimizer",
]
