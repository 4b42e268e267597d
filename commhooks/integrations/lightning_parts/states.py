"""The states of all ranks in checkpoints of the Trainer and of Fabric, which one rank writes."""

from collections.abc import Mapping
from typing import Any

from commhooks.adapters.handle import HookHandle
from commhooks.hook.base import CommHook
from commhooks.integrations.gathered_state import GatheredState, warn_of_no_state

__all__ = ["KEY", "add_states", "load_state"]

KEY = "commhooks"


def add_states(handle: HookHandle, checkpoint: dict[str, Any]) -> None:
    """Add the states of all ranks, unless a torch-style function keeps its own. Collective."""
    if isinstance(handle.hook, CommHook):
        checkpoint[KEY] = GatheredState(handle).state_dict()


def load_state(handle: HookHandle, checkpoint: Mapping[str, Any], key: str = KEY) -> None:
    """Load the state of this rank. Collective."""
    if not isinstance(handle.hook, CommHook):
        return
    if key in checkpoint:
        GatheredState(handle).load_state_dict(checkpoint[key])
    else:
        warn_of_no_state(handle)
