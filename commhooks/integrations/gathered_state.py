"""Save the per-rank states of hooks in the checkpoints of other libraries."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from commhooks.adapters.handle import HookHandle
from commhooks.errors import CommHookStateError

__all__ = ["GatheredState", "warn_of_no_state"]


class GatheredState:
    """The state of a hook on all ranks, for checkpoints that one rank writes and all ranks read.

    ::

        state = {"model": net.state_dict(), "hook": GatheredState(handle).state_dict()}
        if rank == 0:
            torch.save(state, path)
        ...
        GatheredState(handle).load_state_dict(torch.load(path)["hook"])

    The memory of rank 0 must hold the states of all ranks.
    """

    def __init__(self, handle: HookHandle) -> None:
        self.handle = handle

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, and none on the other ranks. Collective."""
        own = self.handle.state_dict()
        states: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with _group_on_cpu() as group:
            dist.gather_object(own, states, group_dst=0, group=group)
        return {"ranks": states or []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's state of those that rank 0 got from :meth:`state_dict`. Collective.

        Raises:
            CommHookStateError: See :meth:`HookHandle.load_state_dict`.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        states = state.get("ranks", [])
        if len(states) != size:
            raise CommHookStateError(
                f"[rank {rank}] expected the states of {size} ranks, found {len(states)}. For "
                "another number of ranks, save commhooks.integrations.checkpoint.HookState(handle) "
                "with torch.distributed.checkpoint"
            )
        self.handle.load_state_dict(states[rank])


def warn_of_no_state(handle: HookHandle) -> None:
    """Warn that a checkpoint was saved without a hook."""
    warnings.warn(
        f"the checkpoint has no state of a hook, so {handle.hook!r} begins without one, at its "
        "first step",
        stacklevel=3,
    )


@contextmanager
def _group_on_cpu() -> Iterator[dist.ProcessGroup]:
    """Yield a group of all ranks that need not copy objects to a GPU."""
    world = dist.group.WORLD
    assert world is not None
    if "gloo" in str(dist.get_backend_config(world)):
        yield world
        return
    group = dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
