"""Compare hooks on a model, over links. ``commhooks compare`` shows the result."""

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
