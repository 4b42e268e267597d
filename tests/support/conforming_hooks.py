"""Every hook of this package, with the options it is tested with."""

from commhooks import algorithms
from commhooks.costs.timeline import Timing
from commhooks.planning import GroupPlan, Plan
from commhooks.testing.probe import probe_parameters

# Options that make each hook active from the first step, `{}` for its defaults. Hooks that are not
# listed are checked with their defaults.
POWERSGD = {"name": "powersgd", "rank": 2, "min_compression_rate": 1.0, "start_step": 0}
# Only one hook keeps state: others would go on if its gradients are not finite.
PLANNED = {
    "matrix": "powersgd:rank=2,min_compression_rate=1.0,start_step=0",
    "convolution": "bf16",
    "odd": "fp8:error_feedback=false",
    "transposed": "powersgd:rank=2,min_compression_rate=1.0,start_step=0",
}
NO_TIME = Timing(0.0, 0.0, 0.0, 0)
PLAN = Plan(
    tuple(
        GroupPlan((name,), 0, PLANNED.get(name, "allreduce"), 1, 0.0, 0.0, 0.0, 1.0, "")
        for name in probe_parameters()
    ),
    NO_TIME,
    NO_TIME,
    error=0.1,
    limit=0.1,
    reason="by hand",
).to_json()
OPTIONS: dict[str, list[dict[str, object]]] = {
    "powersgd": [
        {"rank": 2, "min_compression_rate": 1.0, "start_step": 0},
        {"rank": 1, "min_compression_rate": 1.0, "start_step": 0, "two_sided": False},
        {"rank": 1, "min_compression_rate": 1.0, "start_step": 0, "num_iters_per_step": 2},
        {"rank": 2, "min_compression_rate": 1.0, "start_step": 0, "error_dtype": "bfloat16"},
        {},
    ],
    "gossip": [{"what": "gradients", "average_every": 2}, {"average_every": 2}],
    "push_sum": [{"topology": "uniform"}, {}],
    "hierarchical": [
        {"inner": "allreduce", "ranks_per_node": 1},
        {"inner": POWERSGD, "ranks_per_node": 1},
    ],
    "local_sgd": [
        {"period": 1},
        {"period": 3, "start_step": 1},
    ],
    "diloco": [
        {"period": 2, "delay": 1, "fragments": 2, "inner": "int8"},
        {"period": 1, "inner": POWERSGD},
    ],
    "bf16": [{"two_shot": True}, {}, {"stochastic": True}],
    "fp8": [{}, {"format": "e5m2", "error_feedback": False}],
    "fp4": [{}, {"format": "mxfp4", "error_feedback": False}, {"format": "e3m0"}],
    "int2": [{}, {"error_feedback": False}, {"rotate": True}],
    "int4": [{}, {"stochastic": True, "error_feedback": False}, {"rotate": True}],
    "int8": [{}, {"error_dtype": "bfloat16"}, {"stochastic": True, "error_feedback": False}],
    "qsgd": [{}, {"levels": 1, "norm": "l2"}],
    "signsgd": [{}, {"error_feedback": False}],
    "terngrad": [{}, {"clip": 0.0}],
    "batched_powersgd": [{"rank": 2, "min_compression_rate": 1.0, "start_step": 0}],
    "cast": [{"inner": "allreduce"}, {"inner": POWERSGD, "dtype": "float64"}],
    "error_feedback": [
        {"inner": "bf16"},
        {"inner": "bf16", "error_dtype": "bfloat16"},
        {"inner": {"name": "cast", "inner": "allreduce"}, "decay": 0.5},
    ],
    "auto": [{"plan": PLAN}, {}],
    "guard": [
        {"inner": POWERSGD, "max_error": 2.0, "every": 1},
        {"inner": "int8", "max_error": 1e-6},  # falls back in the second step
        {"inner": {"name": "auto", "plan": PLAN}, "max_error": 2.0, "every": 1},
    ],
    "route": [
        {"rules": [["*r", "allreduce"], ["m*", POWERSGD]], "default": "bf16"},
        {"rules": [["*", "allreduce"]]},
    ],
    "schedule": [
        {"stages": [[0, "allreduce"], [1, POWERSGD]]},
        {"stages": [[0, POWERSGD], [1, "bf16"]], "cycle": 5, "keep_state": False},
    ],
    "skip_nonfinite": [
        {"inner": "allreduce"},
        {"inner": POWERSGD, "whole_steps": True},
        {"inner": {"name": "route", "rules": [["m*", POWERSGD]], "default": "bf16"}},
    ],
    "demo": [{"density": 0.1, "tile": 8}, {"sign": True}],
    "dgc": [{"density": 0.1, "warmup_steps": 2, "clip": 1.0}, {}],
    "randomk": [{"density": 0.2}, {"density": 0.2, "error_feedback": True}],
    "threshold": [{"value": 0.5}, {"value": 1e9}, {"value": 0.5, "error_feedback": False}],
    "topk": [
        {"density": 0.1, "warmup_steps": 2},
        {"density": 0.5, "warmup_steps": 0, "error_feedback": False},
        {"density": 0.1, "warmup_steps": 1, "chunk": 320, "bits": 4},
        {},
    ],
    "shared_topk": [{"density": 0.1, "warmup_steps": 1}],
}
OWN_HOOKS = sorted(algorithms.HOOKS)
CASES = [(name, options) for name in OWN_HOOKS for options in OPTIONS.get(name, [{}])]
