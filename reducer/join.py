"""Training with uneven inputs: a rank that has no inputs left takes part in the others' steps.

Note [Uneven inputs]
~~~~~~~~~~~~~~~~~~~~
At the start of each forward, ranks tell each other what they are about to do (:class:`StepPlan`). A
rank without inputs *shadows* the step: it rebuilds buckets, synchronizes buffers and calls the hook
for every bucket in the same order, with gradients of zero. Hooks therefore need not know about it,
whatever they send or remember. Only a forward can tell which buckets
``skip_all_reduce_unused_params`` skips; ranks with inputs send that after theirs. The root of
broadcasts is the highest rank that still has inputs. When all ranks have finished, the model of the
rank that finished last is broadcast.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from reducer.peers import broadcast, collective, wait
from reducer.wrapper import Wrapper

_PLANS = "the exchange of what each rank is about to do, inside join(),"


@dataclass(frozen=True)
class StepPlan:
    """The plan of all ranks for a step. ``active``: the ranks that have inputs."""

    active: list[int]
    synchronizes: bool
    syncs_buffers: bool

    @classmethod
    def agree(
        cls,
        model: Wrapper,
        *,
        is_active: bool,
        synchronizes: bool = False,
        syncs_buffers: bool = False,
    ) -> "StepPlan":
        """Combine the plans of all ranks. Collective: one all-gather of three bytes."""
        own = torch.tensor(
            [is_active, synchronizes, syncs_buffers], dtype=torch.uint8, device=model.device
        )
        plans = [torch.empty_like(own) for _ in range(model.process_group.size())]
        with collective(model.process_group, _PLANS):
            wait(dist.all_gather(plans, own, group=model.process_group, async_op=True))
            of_ranks = torch.stack(plans).tolist()
        return cls(
            [rank for rank, plan in enumerate(of_ranks) if plan[0]],
            any(plan[1] for plan in of_ranks),
            any(plan[2] for plan in of_ranks),
        )

    @property
    def root(self) -> int:
        """The rank whose buffers are broadcast."""
        return self.active[-1]

    def share_skipped(self, model: Wrapper) -> list[bool]:
        """Return which buckets the root's step skips. Collective, after forward."""
        skipped = model.reducer.skipped_buckets
        if model.options.skip_all_reduce_unused_params:
            of_root = torch.tensor(skipped, dtype=torch.uint8).to(model.device)
            with collective(model.process_group, "the broadcast of which buckets a step skips"):
                dist.broadcast(of_root, group=model.process_group, group_src=self.root)
                skipped = [flag != 0 for flag in of_root.tolist()]
        return skipped

    def gradient_scale(self, model: Wrapper) -> float:
        """Return the factor of gradients that lets the hook average over active ranks only."""
        if model.divide_by_initial_world_size:
            return 1.0
        return model.process_group.size() / len(self.active)


class UnevenInputs(Join):
    """Torch's Join, whose own collectives raise CommHookPeerError as well if a peer is lost."""

    def __exit__(self, *error: Any) -> None:
        """Take part in the steps of ranks that have inputs left, if the block has not raised."""
        assert self._process_group is not None
        with collective(self._process_group, _PLANS):
            super().__exit__(*error)


class ShadowHook(JoinHook):
    """Lets a rank without inputs take part in the steps of the others. See Note [Uneven inputs].

    ``divide_by_initial_world_size``: count ranks without inputs in the average. Join passes all
    options to all of its objects, so this one ignores options that it does not know.

    Raises ValueError if ranks without inputs shall not count, but the hook averages no gradients;
    or if parameters have process groups of their own, in which other ranks finish last.
    """

    def __init__(
        self,
        model: Wrapper,
        *,
        divide_by_initial_world_size: bool = True,
        **_of_others: Any,
    ) -> None:
        super().__init__()
        if model.options.group_keys.process_groups:
            raise ValueError(
                "join() copies the model of the rank that finishes last to all ranks, but not all "
                "share the parameters in key_process_groups: give all ranks equally many inputs"
            )
        if not divide_by_initial_world_size and not model.hook_registration.averages_gradients:
            raise ValueError(
                "divide_by_initial_world_size=False averages gradients over the ranks that have "
                "inputs, but the model's hook leaves gradients as they are and averages "
                "parameters: omit that option"
            )
        model.divide_by_initial_world_size = divide_by_initial_world_size
        self._model = model

    def main_hook(self) -> None:
        """Take part in one forward and backward of the ranks that have inputs."""
        model = self._model
        plan = StepPlan.agree(model, is_active=False)
        if plan.synchronizes:
            model.prepare_step()
        if plan.syncs_buffers:
            model.sync_buffers(plan.root)
        if plan.synchronizes:
            model.reducer.match_backward(plan.share_skipped(model))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of the rank that finished last to all ranks."""
        model = self._model
        rank = model.process_group.rank()
        with collective(model.process_group, "the search for the rank that finished last"):
            last = model._find_common_rank(rank, is_last_joiner)  # type: ignore[no-untyped-call]  # noqa: SLF001
        model._assign_modules_buffers()  # type: ignore[no-untyped-call]  # noqa: SLF001
        model._casts.restore()  # noqa: SLF001
        buffers = model.modules_buffers if model.forward_sync_buffers else []
        parameters = model.not_ignored_parameters().values()
        broadcast(model.process_group, [*parameters, *buffers], last)
        model.hook_registration.on_overwrite()
