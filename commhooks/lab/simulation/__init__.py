"""Predicts what a step takes with a hook on a network that is not there; see docs/scaling.md.

::

    a model, hooks  ── measure() ──►  Measurements  ── predict(network, backend) ──►  Prediction
                       seconds,                        milliseconds,
                       on this machine                 for any number of ranks

Imports: adapters, cluster, comm, costs, errors, hook, lab, lab.models, reducer.
"""

from commhooks.costs.gloo import Gloo
from commhooks.costs.nccl import NCCL
from commhooks.costs.network import Backend, Link, Network
from commhooks.lab.simulation.break_even import PayingRates, paying_rates
from commhooks.lab.simulation.dry_runs import Rehearsals, rehearsed_sizes
from commhooks.lab.simulation.measurements import Measurements, measure
from commhooks.lab.simulation.measuring import Subject
from commhooks.lab.simulation.prediction import Prediction, predict
from commhooks.lab.simulation.study import BASELINE, Study

__all__ = [
    "BASELINE",
    "NCCL",
    "Backend",
    "Gloo",
    "Link",
    "Measurements",
    "Network",
    "PayingRates",
    "Prediction",
    "Rehearsals",
    "Study",
    "Subject",
    "measure",
    "paying_rates",
    "predict",
    "rehearsed_sizes",
]
