"""The hooks of this package, one algorithm per file, imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commhooks.hook.registry import declare

if TYPE_CHECKING:
    from commhooks.algorithms.adaptive.auto import Auto as Auto
    from commhooks.algorithms.averaging.diloco import DiLoCo as DiLoCo
    from commhooks.algorithms.averaging.gossip import Gossip as Gossip
    from commhooks.algorithms.averaging.hierarchical import Hierarchical as Hierarchical
    from commhooks.algorithms.averaging.local_sgd import LocalSGD as LocalSGD
    from commhooks.algorithms.averaging.push_sum import PushSum as PushSum
    from commhooks.algorithms.exact import AllReduce as AllReduce
    from commhooks.algorithms.exact import Bfloat16 as Bfloat16
    from commhooks.algorithms.exact import Float16 as Float16
    from commhooks.algorithms.exact import Noop as Noop
    from commhooks.algorithms.lowrank.batched_powersgd import BatchedPowerSGD as BatchedPowerSGD
    from commhooks.algorithms.lowrank.powersgd import PowerSGD as PowerSGD
    from commhooks.algorithms.quantized.floats import Fp4 as Fp4
    from commhooks.algorithms.quantized.floats import Fp8 as Fp8
    from commhooks.algorithms.quantized.integers import Int2 as Int2
    from commhooks.algorithms.quantized.integers import Int4 as Int4
    from commhooks.algorithms.quantized.integers import Int8 as Int8
    from commhooks.algorithms.quantized.signs import OneBit as OneBit
    from commhooks.algorithms.quantized.signs import SignSGD as SignSGD
    from commhooks.algorithms.quantized.stochastic import QSGD as QSGD
    from commhooks.algorithms.quantized.stochastic import Natural as Natural
    from commhooks.algorithms.quantized.stochastic import TernGrad as TernGrad
    from commhooks.algorithms.sparse.demo import DeMo as DeMo
    from commhooks.algorithms.sparse.dgc import DGC as DGC
    from commhooks.algorithms.sparse.randomk import RandomK as RandomK
    from commhooks.algorithms.sparse.shared_topk import SharedTopK as SharedTopK
    from commhooks.algorithms.sparse.threshold import Threshold as Threshold
    from commhooks.algorithms.sparse.topk import TopK as TopK
    from commhooks.algorithms.wrappers.cast import Cast as Cast
    from commhooks.algorithms.wrappers.error_feedback import ErrorFeedback as ErrorFeedback
    from commhooks.algorithms.wrappers.guard import Guard as Guard
    from commhooks.algorithms.wrappers.route import Route as Route
    from commhooks.algorithms.wrappers.schedule import Schedule as Schedule
    from commhooks.algorithms.wrappers.skip_nonfinite import SkipNonfinite as SkipNonfinite

HOOKS = {
    "allreduce": "exact:AllReduce",
    "auto": "adaptive.auto:Auto",
    "batched_powersgd": "lowrank.batched_powersgd:BatchedPowerSGD",
    "bf16": "exact:Bfloat16",
    "cast": "wrappers.cast:Cast",
    "demo": "sparse.demo:DeMo",
    "dgc": "sparse.dgc:DGC",
    "diloco": "averaging.diloco:DiLoCo",
    "error_feedback": "wrappers.error_feedback:ErrorFeedback",
    "fp16": "exact:Float16",
    "fp4": "quantized.floats:Fp4",
    "fp8": "quantized.floats:Fp8",
    "gossip": "averaging.gossip:Gossip",
    "guard": "wrappers.guard:Guard",
    "hierarchical": "averaging.hierarchical:Hierarchical",
    "int2": "quantized.integers:Int2",
    "int4": "quantized.integers:Int4",
    "int8": "quantized.integers:Int8",
    "local_sgd": "averaging.local_sgd:LocalSGD",
    "natural": "quantized.stochastic:Natural",
    "noop": "exact:Noop",
    "onebit": "quantized.signs:OneBit",
    "powersgd": "lowrank.powersgd:PowerSGD",
    "push_sum": "averaging.push_sum:PushSum",
    "qsgd": "quantized.stochastic:QSGD",
    "randomk": "sparse.randomk:RandomK",
    "route": "wrappers.route:Route",
    "schedule": "wrappers.schedule:Schedule",
    "shared_topk": "sparse.shared_topk:SharedTopK",
    "signsgd": "quantized.signs:SignSGD",
    "skip_nonfinite": "wrappers.skip_nonfinite:SkipNonfinite",
    "terngrad": "quantized.stochastic:TernGrad",
    "threshold": "sparse.threshold:Threshold",
    "topk": "sparse.topk:TopK",
}
"""The module and class of each name."""

_MODULES = {kind: module for module, _, kind in (p.partition(":") for p in HOOKS.values())}
__all__ = sorted(_MODULES)

declare({name: f"{__name__}.{place}" for name, place in HOOKS.items()})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
