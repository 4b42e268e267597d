"""Run one hook after the other, by step::

start, hook = max((start, hook) for start, hook in stages if start <= step)
result = hook(gradient)
"""

from bisect import bisect
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookOptionError
from commhooks.hook.base import CommHook, has_consensus, tree
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from reducer import GradBucket


@register_hook("schedule")
@dataclass
class Schedule(CommHook):
    """Use one hook from one step on and another from a later step on, e.g. after a warm-up.

    ``schedule([(0, "allreduce"), (1000, {"name": "powersgd", "rank": 4})])`` averages exactly in
    steps 0 to 999. Steps are the synchronized backward passes of the training, including those
    before a resume, also for nested hooks: their ``start_step`` is not relative to their stage.
    With a ``cycle``, each hook counts only the steps in which it runs, so that what it does in turn
    (sides, partners, periods) goes on in its next turn.

    When a hook will not be used again, its state is cleared. State that stages should share, such
    as an error, belongs to a wrapper of the schedule: ``error_feedback(schedule(...))``.

    Raises:
        CommHookOptionError: steps do not ascend from 0, or the last stage begins after the end of
            the ``cycle``; or a hook under which models differ precedes a hook that averages
            gradients, so that the models would stay different; or a hook with delayed exchanges
            would be cleared. Use ``handle.replace`` for that: it averages the models, and waits for
            exchanges.
    """

    stages: Annotated[list[tuple[Annotated[int, Limits(ge=0)], CommHook]], Limits(min_length=1)]
    """The first step and the hook of each stage; steps ascend from 0."""
    cycle: Annotated[int, Limits(ge=1)] | None = None
    """Number of steps after which the schedule starts again; never, if None."""
    keep_state: bool = True
    """With a ``cycle``, keep the state of a hook for its next turn."""

    lossless = True
    tells_contribution = True
    state_fields = no_state
    wire = "what the hook of the step sends"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last_used: CommHook | None = None
        steps = [step for step, _ in self.stages]
        if steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
            raise CommHookOptionError(
                f"option 'stages' of hook {self.name!r}: expected steps that ascend from 0, found "
                f"{steps}"
            )
        if self.cycle is not None and self.cycle <= steps[-1]:
            raise CommHookOptionError(
                f"option 'cycle' of hook {self.name!r}: expected more steps than {steps[-1]}, "
                f"where the last stage begins, found {self.cycle}"
            )
        hooks = [hook for _, hook in self.stages]
        for before, after in pairwise(hooks if self.cycle is None else [*hooks, hooks[0]]):
            if has_consensus(after) and not has_consensus(before):
                raise CommHookOptionError(
                    f"option 'stages' of hook {self.name!r}: models differ under {before!r}, and "
                    f"{after!r} after it averages gradients only, so they would stay different. "
                    "Call handle.replace() at that step instead, which averages the parameters of "
                    "all ranks, and create a new optimizer"
                )
        cleared = [] if self.cycle is not None and self.keep_state else hooks
        for hook in cleared[:-1] if self.cycle is None else cleared:
            if any(each.has_exchanges for each in tree(hook)):
                raise CommHookOptionError(
                    f"option 'stages' of hook {self.name!r}: {hook!r} begins exchanges that take "
                    "several steps, and one may be under way when its stage ends and its state is "
                    "cleared. Use it in the last stage, or with a cycle and keep_state=True; or "
                    "call handle.replace() at that step instead, which waits for exchanges"
                )

    @property
    def checks_finite(self) -> bool:
        """Whether a hook checks the buckets of the model; with a cycle, hooks get others."""
        return self.cycle is None and any(hook.checks_finite for _, hook in self.stages)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        hook, bucket = self._at(bucket)
        if hook is not self._last_used:  # also in the first step after a resume
            self._last_used = hook
            for _, other in self.stages if self.cycle is None or not self.keep_state else ():
                if other is not hook:
                    other.load_state_dict({})
        nested = comm.within(hook, wants_contribution=comm.wants_contribution)
        average = await hook.reduce(bucket, nested)
        comm.contribution = nested.contribution
        return average

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        hook, bucket = self._at(bucket)
        return hook.wire_bytes(bucket, size)

    def turn_at(self, step: int) -> tuple[CommHook, int]:
        """Return the hook of a step of the training, and the step that it counts."""
        starts = [start for start, _ in self.stages]
        cycles, step = divmod(step, self.cycle) if self.cycle else (0, step)
        stage = bisect(starts, step) - 1
        if self.cycle:
            length = [*starts, self.cycle][stage + 1] - starts[stage]
            step += cycles * length - starts[stage]
        return self.stages[stage][1], step

    def _at(self, bucket: GradBucket) -> tuple[CommHook, GradBucket]:
        """Return the hook of the step of a bucket, and the bucket with the step that it counts."""
        hook, step = self.turn_at(bucket.step)
        return hook, bucket_with(bucket, bucket.buffer(), step=step) if self.cycle else bucket
