"""Turns what is known of the run into the problem that the solver takes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commhooks.algorithms.adaptive.fit import Cost
from commhooks.algorithms.adaptive.groups import Layout, ParameterGroup
from commhooks.algorithms.adaptive.knowledge import Knowledge
from commhooks.algorithms.adaptive.link import network_of, tensor_bytes
from commhooks.algorithms.adaptive.report import Agreed
from commhooks.costs.backends import Backend
from commhooks.costs.step_trace import Collective, Members
from commhooks.planning.assignment import squared_error
from commhooks.planning.plan import Plan
from commhooks.planning.problem import BucketTimes, Choice, Group, Problem
from commhooks.planning.solver import without_contention

__all__ = ["Situation"]

_ALL = Members(1, spans_nodes=True)


@dataclass(frozen=True)
class Situation:
    """The same on all ranks. ``hooks``: specs, the exact one first."""

    hooks: tuple[str, ...]
    lossless: tuple[bool, ...]
    layout: Layout
    knowledge: Knowledge
    agreed: Agreed
    link: Cost
    norms: tuple[float, ...]
    limit: float
    backend: Backend
    size: int

    def problem(self, in_use: Mapping[str, str] | None) -> Problem:
        """Return the problem to solve. ``in_use``: the hooks of the steps that were measured."""
        costs = [self.knowledge.local_cost(i) for i in range(len(self.hooks))]
        launches = [_known(seconds) for seconds in self.agreed.launches]
        problem = Problem(
            hooks=self.hooks,
            overheads=tuple(cost.per_unit for cost in costs),
            groups=tuple(
                Group(group.names, group.bucket, group.label, group.elements, norm, choices)
                for group, norm in zip(self.layout.groups, self.norms, strict=True)
                if (choices := tuple(self._choices(group, costs)))
            ),
            buckets=tuple(
                BucketTimes(seconds, 0.0, nbytes)
                for seconds, nbytes in zip(launches, self.layout.bucket_bytes, strict=True)
            ),
            forward_seconds=_known(self.agreed.forward_seconds),
            network=network_of(self.link, self.size),
            backend=self.backend,
            cores=self.agreed.cores,
            error=self.limit,
        )
        return without_contention(problem, in_use)

    def error_of(self, plan: Plan) -> float:
        """Return the error of a plan by what is known now."""
        hook_of, wrong, right = plan.hook_of(), 0.0, 0.0
        for group, norm in zip(self.layout.groups, self.norms, strict=True):
            hook = self.hooks.index(hook_of.get(group.names[0], self.hooks[0]))
            right += norm**2
            wrong += squared_error(self._error(group, hook), norm)
        return math.sqrt(wrong / right) if right else 0.0

    def _choices(self, group: ParameterGroup, costs: Sequence[Cost]) -> list[Choice]:
        itemsize = self.layout.bucket_bytes[group.bucket] / max(
            sum(g.elements for g in self.layout.groups if g.bucket == group.bucket), 1
        )
        exact = Choice(
            0,
            (costs[0].per_byte * group.elements, 0.0),
            (Collective("all_reduce", group.elements * itemsize, _ALL),),
            0.0,
        )
        others = [] if group.is_exact else range(1, len(self.hooks))
        found = [self._choice(group, hook, costs[hook]) for hook in others]
        return [exact, *(choice for choice in found if choice is not None)]

    def _choice(self, group: ParameterGroup, hook: int, cost: Cost) -> Choice | None:
        trial = self.knowledge.trial(group, hook)
        if trial is None:
            return None
        sent = math.fsum(stage.wire_bytes for stage in trial.stages)
        if hook in group.wire_bytes and sent > 0:  # rows of a matrix do not show a low rank's bytes
            factor = group.wire_bytes[hook] / sent
        else:
            factor = group.elements / max(trial.elements, 1)
        total = math.fsum(trial.local_seconds) or 1.0
        seconds = cost.per_byte * group.elements
        return Choice(
            hook,
            tuple(seconds * local / total for local in trial.local_seconds),
            tuple(
                Collective(
                    stage.operation,
                    tensor_bytes(stage.operation, stage.wire_bytes, self.size) * factor,
                    _ALL,
                )
                for stage in trial.stages
            ),
            self._error(group, hook),
        )

    def _error(self, group: ParameterGroup, hook: int) -> float:
        if self.lossless[hook]:
            return 0.0
        error = self.knowledge.error(group, hook)
        return math.inf if math.isnan(error) else error


def _known(seconds: float) -> float:
    return seconds if seconds == seconds else 0.0
