"""The hooks of this package, one algorithm per file; importing it registers their names."""

from commhooks.algorithms.allreduce import AllReduce
from commhooks.algorithms.batched_powersgd import BatchedPowerSGD
from commhooks.algorithms.cast import Cast
from commhooks.algorithms.dgc import DGC
from commhooks.algorithms.error_feedback import ErrorFeedback
from commhooks.algorithms.fp8 import Fp8
from commhooks.algorithms.gossip import Gossip
from commhooks.algorithms.half import Bfloat16, Float16
from commhooks.algorithms.hierarchical import Hierarchical
from commhooks.algorithms.integer import Int4, Int8
from commhooks.algorithms.local_sgd import LocalSGD
from commhooks.algorithms.natural import Natural
from commhooks.algorithms.noop import Noop
from commhooks.algorithms.onebit import OneBit
from commhooks.algorithms.powersgd import PowerSGD
from commhooks.algorithms.push_sum import PushSum
from commhooks.algorithms.qsgd import QSGD
from commhooks.algorithms.randomk import RandomK
from commhooks.algorithms.route import Route
from commhooks.algorithms.schedule import Schedule
from commhooks.algorithms.signsgd import SignSGD
from commhooks.algorithms.skip_nonfinite import SkipNonfinite
from commhooks.algorithms.terngrad import TernGrad
from commhooks.algorithms.threshold import Threshold
from commhooks.algorithms.topk import TopK

__all__ = [
    "DGC",
    "QSGD",
    "AllReduce",
    "BatchedPowerSGD",
    "Bfloat16",
    "Cast",
    "ErrorFeedback",
    "Float16",
    "Fp8",
    "Gossip",
    "Hierarchical",
    "Int4",
    "Int8",
    "LocalSGD",
    "Natural",
    "Noop",
    "OneBit",
    "PowerSGD",
    "PushSum",
    "RandomK",
    "Route",
    "Schedule",
    "SignSGD",
    "SkipNonfinite",
    "TernGrad",
    "Threshold",
    "TopK",
]
