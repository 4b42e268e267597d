"""Compare hooks on a model, over links. ``commhooks compare`` shows the result.

Imports: adapters, cluster, comm, errors, hook, lab, lab.models, lab.simulation.
"""

from commhooks.lab.comparison.compare import compare
from commhooks.lab.comparison.result import (
    Comparison,
    ComparisonError,
    ComparisonInterrupted,
    Failure,
    HostPair,
    Row,
    TrainingPoint,
)

__all__ = [
    "Comparison",
    "ComparisonError",
    "ComparisonInterrupted",
    "Failure",
    "HostPair",
    "Row",
    "TrainingPoint",
    "compare",
]
