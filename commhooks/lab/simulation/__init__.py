"""Predict what a step takes with a hook on a network that is not available; see docs/scaling.md.

::

    a model, hooks  ── measure() ──►  Measurements  ── predict(network, backend) ──►  Prediction
                       seconds,                        milliseconds,
                       on this machine                 for any number of ranks
"""

from commhooks.lab.simulation.measurements import Job, Measurements, measure
from commhooks.lab.simulation.study import (
    BASELINE,
    BreakEvenRates,
    Study,
    break_even_rates,
    curve_sizes,
)

__all__ = [
    "BASELINE",
    "BreakEvenRates",
    "Job",
    "Measurements",
    "Study",
    "break_even_rates",
    "curve_sizes",
    "measure",
]
