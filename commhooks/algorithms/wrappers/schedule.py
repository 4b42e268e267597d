"""One hook after the other, by step. Wire: that of the hook of the step."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookOptionError
from commhooks.hook.base import CommHook, has_consensus
from commhooks.hook.options import Ge, MinLen
from commhooks.hook.registry import register_hook
from reducer import GradBucket

__all__ = ["Schedule"]


@register_hook("schedule")
@dataclass
class Schedule(CommHook):
    """Use one hook from one step on, another from a later one, e.g. to warm up, then compress.

    ``schedule([(0, "allreduce"), (1000, {"name": "powersgd", "rank": 4})])`` averages exactly in
    steps 0 to 999. Steps are the synchronized backward passes of the training, those before a
    resume included; nested hooks count them so as well, so a ``start_step`` of theirs is not
    relative to their stage.

    What a hook remembers is forgotten, and its memory freed, when it will not be used again. With a
    ``cycle`` it will: then it is kept until the schedule comes back to the hook, or forgotten at
    the end of each of its stages if not ``keep_state``. What several stages are to share, such as
    an error, goes around the schedule: ``error_feedback(schedule(...))``.

    Wire: that of the hook of the step.

    Raises:
        CommHookOptionError: steps do not ascend from 0, or the last stage is beyond the ``cycle``;
            or a hook that lets models differ comes before one that averages gradients, under which
            they would never be one again. For that use ``handle.replace``, which averages them.
    """

    stages: Annotated[list[tuple[Annotated[int, Ge(0)], CommHook]], MinLen(1)]
    """The first step of each stage, and its hook; steps ascend from 0."""
    cycle: Annotated[int, Ge(1)] | None = None
    """Start over after this many steps; never, if None."""
    keep_state: bool = True
    """In a ``cycle``: keep what a hook remembers for its next turn."""

    _last_used: CommHook | None = field(default=None, init=False, repr=False, compare=False)

    lossless = True
    tells_contribution = True
    wire = "what the hook of the step sends"

    def __post_init__(self) -> None:
        super().__post_init__()
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
                    f"{after!r} after it averages gradients only, so they would stay apart. Call "
                    "handle.replace() at that step instead, which averages the parameters of all "
                    "ranks, and make a new optimizer"
                )

    @property
    def checks_finite(self) -> bool:  # type: ignore[override]  # depends on options
        """Whether one of the hooks does."""
        return any(hook.checks_finite for _, hook in self.stages)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        hook = self.hook_at(bucket.step)
        if hook is not self._last_used:
            self._switch(hook)
        nested = comm.within(hook, wants_contribution=comm.wants_contribution)
        average = await hook.reduce(bucket, nested)
        comm.contribution = nested.contribution
        return average

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        return self.hook_at(bucket.step).wire_bytes(bucket, size)

    def hook_at(self, step: int) -> CommHook:
        """The hook of a step of the training."""
        if self.cycle is not None:
            step %= self.cycle
        return next(hook for start, hook in reversed(self.stages) if start <= step)

    def _switch(self, hook: CommHook) -> None:
        """Also in the first step of a run, which in a resumed one may be that of a new stage."""
        self._last_used = hook
        if self.cycle is None or not self.keep_state:
            for _, other in self.stages:
                if other is not hook:
                    other.load_state_dict({})
