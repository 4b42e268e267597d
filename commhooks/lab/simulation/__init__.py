"""Predict what a step takes with a hook on a network that is not available; see docs/scaling.md.

::

    a model, hooks  ── measure() ──►  Measurements  ── predict(network, backend) ──►  Prediction
                       seconds,                        milliseconds,
                       on this machine                 for any number of ranks
"""

from commhooks.costs.backends import NCCL, Backend, Gloo
from commhooks.costs.network import Link, Network
from commhooks.costs.prediction import DryRuns, Prediction, dry_run_sizes, predict
from commhooks.lab.simulation.measurements import Job, Measurements, measure
from commhooks.lab.simulation.study import BASELINE, BreakEvenRates, Study, break_even_rates

__all__ = [
    "BASELINE",
    "NCCL",
    "Backend",
    "BreakEvenRates",
    "DryRuns",
    "Gloo",
    "Job",
    "Link",
    "Measurements",
    "Network",
    "Prediction",
    "Study",
    "break_even_rates",
    "dry_run_sizes",
    "measure",
    "predict",
]
