"""The hooks of this package, one algorithm per file; importing it registers their names."""

from commhooks.algorithms.allreduce import AllReduce
from commhooks.algorithms.batched_powersgd import BatchedPowerSGD
from commhooks.algorithms.half import Bfloat16, Float16
from commhooks.algorithms.noop import Noop
from commhooks.algorithms.powersgd import PowerSGD
from commhooks.algorithms.topk import TopK

__all__ = ["AllReduce", "BatchedPowerSGD", "Bfloat16", "Float16", "Noop", "PowerSGD", "TopK"]
