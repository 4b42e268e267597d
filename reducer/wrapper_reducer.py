"""The reducer of a wrapper, with what other code calls on torch's reducer.

Note [Backwards that others announce]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A stage of ``torch.distributed.pipelining`` runs all forwards in ``no_sync()``, and announces the
backward of the last microbatch itself: it averages the gradients of all. Manual optimization of
Lightning announces a backward before forward returns. Here, a step also has to be prepared.
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reducer.native import Reducer


class WrapperReducer(Reducer):
    """The ``reducer`` of a wrapper, with methods of torch's.

    ``wrapper``: set by the wrapper.
    """

    wrapper: weakref.ref[Any]
    _was_announced = False

    def begin_step(self, outputs: Sequence[Tensor], scale: float = 1.0) -> None:
        """Announce the backward of a forward, as the wrapper does."""
        super().begin_step(outputs, scale)
        self._was_announced = False

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Announce that the backward which begins now synchronizes. Collective.

        It also averages what backwards in ``no_sync()`` have accumulated. ``outputs``: those of its
        forward, to find unused parameters. See Note [Backwards that others announce].

        Raises RuntimeError if no gradient has come of the last announcement, or none can come.
        """
        model = self.wrapper()
        assert model is not None
        try:
            self._check()
            model.check_parameters()
            model.prepare_step()
            super().begin_step(outputs)
        except Exception as error:
            self.last_error = str(error)
            raise
        self._was_announced = True

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self.await_after_backward(futures)

    def _rebuild_buckets(self) -> bool:
        return self.rebuild_buckets()

    def _delay_all_reduce(self) -> None:
        """Do nothing: the first backward of a static graph averages at its end."""

    def _check(self) -> None:
        rank = f"[Rank {self.process_group.rank()}] "
        if schedule := _schedule_of_weights():
            raise RuntimeError(
                f"{rank}{schedule} computes gradients of weights apart from those of inputs, by "
                "torch.autograd.grad. No reducer is told of them, so they would not be averaged. "
                "Use a schedule with whole backwards, such as Schedule1F1B or "
                "ScheduleInterleaved1F1B, or average gradients after each step of the schedule"
            )
        if self._was_announced and self.awaits_backward:
            self.abort()
            self._was_announced = False
            raise RuntimeError(
                f"{rank}A backward was announced by prepare_for_backward(), and no gradient has "
                "come since, so the gradients of that step were not averaged. Call it on all "
                "ranks, immediately before a backward() that reaches the parameters"
            )


def _schedule_of_weights() -> str | None:
    """Return the name of the pipeline schedule under way, if it has backwards of weights alone."""
    schedules: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    frame = sys._getframe() if schedules else None  # noqa: SLF001
    while frame is not None:
        running = frame.f_locals.get("self")
        if isinstance(running, schedules.PipelineScheduleMulti):
            kind = schedules._ComputationType.BACKWARD_WEIGHT  # noqa: SLF001
            actions = [each for rank in running.pipeline_order.values() for each in rank if each]
            parts = [part for each in actions for part in (each, *(each.sub_actions or ()))]
            if any(part.computation_type == kind for part in parts):
                return type(running).__name__
        frame = frame.f_back
    return None
