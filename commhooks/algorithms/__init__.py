"""The hooks of this package, one algorithm per file; importing it registers their names."""

from commhooks.algorithms.allreduce import AllReduce
from commhooks.algorithms.batched_powersgd import BatchedPowerSGD
from commhooks.algorithms.cast import Cast
from commhooks.algorithms.error_feedback import ErrorFeedback
from commhooks.algorithms.gossip import Gossip
from commhooks.algorithms.half import Bfloat16, Float16
from commhooks.algorithms.hierarchical import Hierarchical
from commhooks.algorithms.local_sgd import LocalSGD
from commhooks.algorithms.noop import Noop
from commhooks.algorithms.powersgd import PowerSGD
from commhooks.algorithms.push_sum import PushSum
from commhooks.algorithms.route import Route
from commhooks.algorithms.schedule import Schedule
from commhooks.algorithms.skip_nonfinite import SkipNonfinite

__all__ = [
    "AllReduce",
    "BatchedPowerSGD",
    "Bfloat16",
    "Cast",
    "ErrorFeedback",
    "Float16",
    "Gossip",
    "Hierarchical",
    "LocalSGD",
    "Noop",
    "PowerSGD",
    "PushSum",
    "Route",
    "Schedule",
    "SkipNonfinite",
]
