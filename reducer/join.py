"""Training with uneven inputs: a rank that has run out takes part in the steps of the others.

Note [Uneven inputs]
~~~~~~~~~~~~~~~~~~~~
At the start of each forward, ranks tell each other what they are about to do (:class:`Plans`). A
rank without inputs *shadows* it: it rebuilds buckets, synchronizes buffers and calls the hook for
every bucket, with gradients of zero, in the same order. So hooks, whatever they send and remember,
need not know. Which buckets ``skip_all_reduce_unused_params`` leaves out only a forward can tell;
after theirs, ranks with inputs do. The root of broadcasts is the highest rank that still has
inputs; in the end the model of the last rank to run out is broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from reducer.distributed import DistributedDataParallel

__all__: list[str] = []


@dataclass(frozen=True)
class Plans:
    """What the ranks are about to do. ``active``: the ranks that have inputs."""

    active: list[int]
    synchronizes: bool
    syncs_buffers: bool

    @classmethod
    def exchange(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        is_active: bool,
        synchronizes: bool = False,
        syncs_buffers: bool = False,
    ) -> Plans:
        """Collective: one all-gather of three bytes."""
        own = torch.tensor([is_active, synchronizes, syncs_buffers], dtype=torch.uint8).to(device)
        rows = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(rows, own, group=group)
        of_ranks = torch.stack(rows).tolist()
        return cls(
            [rank for rank, row in enumerate(of_ranks) if row[0]],
            any(row[1] for row in of_ranks),
            any(row[2] for row in of_ranks),
        )

    @property
    def root(self) -> int:
        """Whose buffers count."""
        return self.active[-1]

    def share_skipped(self, model: DistributedDataParallel) -> list[bool]:
        """Which buckets the step leaves out, by the root's forward. Collective, after forward."""
        skipped = model.reducer.skipped_buckets
        if model.skip_all_reduce_unused_params:
            told = torch.tensor(skipped, dtype=torch.uint8).to(model.device)
            dist.broadcast(told, group=model.process_group, group_src=self.root)
            skipped = [flag != 0 for flag in told.tolist()]
        return skipped

    def gradient_scale(self, group: dist.ProcessGroup) -> float:
        """Where ranks without inputs do not count, although the hook averages over all."""
        return group.size() / len(self.active)


class ShadowHook(JoinHook):
    """What a rank without inputs does. See Note [Uneven inputs].

    ``divide_by_initial_world_size``: count ranks without inputs in the average. Join hands all
    options to all of its objects, so there may be others. ValueError where the hook takes no
    average of gradients.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        divide_by_initial_world_size: bool = True,
        **_of_others: Any,
    ) -> None:
        super().__init__()
        if not divide_by_initial_world_size and not model.hook_registration.averages_gradients:
            raise ValueError(
                "divide_by_initial_world_size=False lets gradients be averaged over the ranks that "
                "have inputs, but the model's hook leaves gradients as they are and averages "
                "parameters: leave that option out"
            )
        model.divide_by_initial_world_size = divide_by_initial_world_size
        self._model = model

    def main_hook(self) -> None:
        """Once per forward of the others: takes part in it, and in its backward."""
        model = self._model
        plans = Plans.exchange(model.process_group, model.device, is_active=False)
        if plans.synchronizes:
            model.reducer.rebuild_buckets()
        if plans.syncs_buffers:
            model.sync_buffers(plans.root)
        if plans.synchronizes:
            model.reducer.shadow_backward(plans.share_skipped(model))

    def post_hook(self, is_last_joiner: bool) -> None:
        """When all have run out: the model of the last is everybody's."""
        model = self._model
        rank = model.process_group.rank()
        candidate = torch.tensor([rank if is_last_joiner else -1], device=model.device)
        dist.all_reduce(candidate, op=dist.ReduceOp.MAX, group=model.process_group)
        model.broadcast_state(int(candidate.item()))
