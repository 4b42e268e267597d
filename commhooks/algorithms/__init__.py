"""The hooks of this package, one algorithm per file; importing it registers their names."""

from commhooks.algorithms.allreduce import AllReduce
from commhooks.algorithms.batched_powersgd import BatchedPowerSGD
from commhooks.algorithms.dgc import DGC
from commhooks.algorithms.half import Bfloat16, Float16
from commhooks.algorithms.noop import Noop
from commhooks.algorithms.powersgd import PowerSGD
from commhooks.algorithms.randomk import RandomK
from commhooks.algorithms.threshold import Threshold
from commhooks.algorithms.topk import TopK

__all__ = [
    "DGC",
    "AllReduce",
    "BatchedPowerSGD",
    "Bfloat16",
    "Float16",
    "Noop",
    "PowerSGD",
    "RandomK",
    "Threshold",
    "TopK",
]
