"""Compare hooks on a model, over links. ``commhooks compare`` shows the result.

::

    Experiment   measures entries under conditions, in one setting after the other
      Entry        a way to average: the bare model, torch DDP, or a hook
      Setting      loopback, a link or a network, and what was measured there
      Task         some steps of an entry: to verify it, to time it, or to train
    on each rank, a ComparedModel does tasks
      EntryRun     an entry with a fresh wrapper; returns FirstSteps, or a Block of StepTimes
      TrainingRun  a training of an entry; returns TrainingPoints
    Figures      medians of an entry over its blocks, of which a Row of the Comparison is made
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
