"""The hooks of this package, one algorithm per file; importing it registers their names."""

from commhooks.algorithms.adaptive.auto import Auto
from commhooks.algorithms.averaging.diloco import DiLoCo
from commhooks.algorithms.averaging.gossip import Gossip
from commhooks.algorithms.averaging.hierarchical import Hierarchical
from commhooks.algorithms.averaging.local_sgd import LocalSGD
from commhooks.algorithms.averaging.push_sum import PushSum
from commhooks.algorithms.exact import AllReduce, Bfloat16, Float16, Noop
from commhooks.algorithms.lowrank.batched_powersgd import BatchedPowerSGD
from commhooks.algorithms.lowrank.powersgd import PowerSGD
from commhooks.algorithms.quantized.floats import Fp4, Fp8
from commhooks.algorithms.quantized.integers import Int2, Int4, Int8
from commhooks.algorithms.quantized.signs import OneBit, SignSGD
from commhooks.algorithms.quantized.stochastic import QSGD, Natural, TernGrad
from commhooks.algorithms.sparse.demo import DeMo
from commhooks.algorithms.sparse.dgc import DGC
from commhooks.algorithms.sparse.randomk import RandomK
from commhooks.algorithms.sparse.shared_topk import SharedTopK
from commhooks.algorithms.sparse.threshold import Threshold
from commhooks.algorithms.sparse.topk import TopK
from commhooks.algorithms.wrappers.cast import Cast
from commhooks.algorithms.wrappers.error_feedback import ErrorFeedback
from commhooks.algorithms.wrappers.guard import Guard
from commhooks.algorithms.wrappers.route import Route
from commhooks.algorithms.wrappers.schedule import Schedule
from commhooks.algorithms.wrappers.skip_nonfinite import SkipNonfinite

__all__ = [
    "DGC",
    "QSGD",
    "AllReduce",
    "Auto",
    "BatchedPowerSGD",
    "Bfloat16",
    "Cast",
    "DeMo",
    "DiLoCo",
    "ErrorFeedback",
    "Float16",
    "Fp4",
    "Fp8",
    "Gossip",
    "Guard",
    "Hierarchical",
    "Int2",
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
    "SharedTopK",
    "SignSGD",
    "SkipNonfinite",
    "TernGrad",
    "Threshold",
    "TopK",
]
