"""Which hook pays, on a model, over a link. ``commhooks compare`` shows what this finds.

Imports: adapters, cluster, comm, errors, hook, lab, lab.models, lab.simulation, reducer.
"""

from commhooks.lab.comparison.compare import ComparisonError, compare
from commhooks.lab.comparison.result import Comparison, Row, TrainingPoint

__all__ = ["Comparison", "ComparisonError", "Row", "TrainingPoint", "compare"]
