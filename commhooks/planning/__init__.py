"""Chooses hooks for groups of parameters: numbers only, no tensors and no processes.

::

    Problem (what each choice costs, and its error)  ── solve() ──►  Plan (a hook per parameter)

``commhooks plan`` makes problems from dry runs, the hook ``auto`` from the run. The design is in
docs/design/2026-11-22-auto.md.
"""

from commhooks.planning.plan import GroupPlan, Plan, merged
from commhooks.planning.problem import Choice, Group, Problem
from commhooks.planning.solver import solve

__all__ = ["Choice", "Group", "GroupPlan", "Plan", "Problem", "merged", "solve"]
