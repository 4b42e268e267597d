"""Problems: random ones, and small ones of which the answer is known."""

import random
from collections.abc import Sequence

from commhooks.costs.backends import Gloo
from commhooks.costs.network import Link, Network
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace
from commhooks.planning import Choice, Group, Problem

__all__ = ["everyone", "group", "problem_of", "random_problem", "step_of"]

GLOO = Gloo(round_seconds=1e-4, message_cpu_seconds=2e-5, byte_cpu_seconds=2e-10)
_OPERATIONS = ("all_reduce", "all_gather", "all_to_all")
everyone = Members(1, spans_nodes=True)


def plain(elements: int) -> Choice:
    """Return plain averaging."""
    sent = Collective("all_reduce", 4.0 * elements, everyone)
    return Choice((0.0, 0.0), (sent,), 0.0)


def group(
    name: str, elements: int, *, bucket: int = 0, norm: float = 1.0, **others: Choice
) -> Group:
    """Return a group of one parameter, whose choices are plain averaging and ``others``."""
    choices = {"allreduce": plain(elements), **others}
    return Group((name,), bucket, elements, norm=norm, choices=choices)


def step_of(buckets: Sequence[BucketTrace], forward: float) -> StepTrace:
    """Return a step without hooks."""
    return StepTrace(tuple(buckets), forward, is_native=False)


def problem_of(
    *groups: Group,
    error: float,
    hooks: tuple[str, ...] = ("allreduce", "half"),
    backward: tuple[float, ...] = (),
    forward: float = 0.01,
) -> Problem:
    """Return a problem of 2 ranks at 1 Gbit/s. Backward takes no time unless it is given."""
    buckets = max((each.bucket for each in groups), default=0) + 1
    times = backward or (0.0,) * buckets
    return Problem(
        overheads=dict.fromkeys(hooks, 0.0),
        groups=groups,
        step=step_of([BucketTrace(1000, seconds, 0.0) for seconds in times], forward),
        network=Network(2, Link(1e9, 20e-6), Link(1e9)),
        backend=GLOO,
        cores=8.0,
        error=error,
    )


def random_problem(
    seed: int, *, buckets: int, groups: int, hooks: int, limit: float | None = None
) -> Problem:
    """Return a problem with ``groups`` groups in each bucket. Hook 0 averages exactly."""
    draw = random.Random(seed)
    size = draw.choice([2, 4, 16])
    kinds = [
        (
            draw.uniform(0.01, 0.9),  # share of the bytes
            10 ** draw.uniform(-3, 0.1),  # error
            draw.choice([1, 2]),  # collectives
            draw.choice(_OPERATIONS),
        )
        for _ in range(hooks - 1)
    ]

    def choice(hook: int, elements: int) -> Choice:
        if hook == 0:
            return plain(elements)
        share, error, count, operation = kinds[hook - 1]
        sent = 4.0 * elements * share / count
        return Choice(
            tuple(elements * 1e-9 * draw.random() for _ in range(count + 1)),
            tuple(Collective(operation, sent, everyone) for _ in range(count)),
            error * draw.uniform(0.5, 1.5),
        )

    names = ("allreduce", *(f"hook{i}" for i in range(1, hooks)))
    made = []
    for bucket in range(buckets):
        for index in range(groups):
            elements = int(10 ** draw.uniform(3, 6.5))
            choices = {name: choice(hook, elements) for hook, name in enumerate(names)}
            made.append(
                Group(
                    names=(f"{bucket}.{index}",),
                    bucket=bucket,
                    elements=elements,
                    norm=elements**0.5 * draw.uniform(0.5, 2),
                    choices=choices,
                )
            )
    return Problem(
        overheads={name: draw.uniform(0, 1e-4) for name in names},
        groups=tuple(made),
        step=step_of(
            [BucketTrace(1000, draw.uniform(1e-3, 5e-2), 1e-4) for _ in range(buckets)], 0.05
        ),
        network=Network(
            size, Link(10 ** draw.uniform(8, 10.5), 20e-6), Link(1e10), ranks_per_node=1
        ),
        backend=GLOO,
        cores=draw.choice([1.0, 2.0, 8.0]),
        error=draw.choice([0.01, 0.05, 0.2]) if limit is None else limit,
    )
