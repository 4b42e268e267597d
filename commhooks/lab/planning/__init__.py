"""Measures what hooks do with each group of a model's parameters, to plan without training.

::

    a model, hooks  ── measure_groups() ──►  Measured  ── problem_of(network, limit) ──►  Problem
"""

from commhooks.lab.planning.measuring import Measured, PlanningJob, measure_groups
from commhooks.lab.planning.problems import error_of_hook, problem_of

__all__ = ["Measured", "PlanningJob", "error_of_hook", "measure_groups", "problem_of"]
