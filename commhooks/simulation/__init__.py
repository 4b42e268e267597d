"""Predicts what a step takes with a hook on a network that is not there; see docs/scaling.md.

::

    a model, hooks  ── measure() ──►  Measurements  ── predict(network, backend) ──►  Prediction
                       seconds,                        milliseconds,
                       on this machine                 for any number of ranks
"""

from commhooks.simulation.gloo import Gloo
from commhooks.simulation.measurements import Measurements, measure
from commhooks.simulation.measuring import Subject
from commhooks.simulation.nccl import NCCL
from commhooks.simulation.network import Backend, Link, Network
from commhooks.simulation.paying import PayingRates, paying_rates
from commhooks.simulation.prediction import Prediction, predict
from commhooks.simulation.rehearsals import Rehearsals, rehearsed_sizes
from commhooks.simulation.study import BASELINE, Study

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
