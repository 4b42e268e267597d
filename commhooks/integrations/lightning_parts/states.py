"""The states of all ranks in a checkpoint of the Trainer, which one rank writes."""

from collections.abc import Mapping
from typing import Any

from commhooks.adapters.handle import HookHandle
from commhooks.integrations.gathered_state import GatheredState, warn_of_no_state

__all__ = ["KEY", "add_states", "load_state"]

KEY = "commhooks"


def add_states(handle: HookHandle, checkpoint: dict[str, Any]) -> None:
    """Add the states of all ranks. Collective."""
    checkpoint[KEY] = GatheredState(handle).state_dict()


def load_state(handle: HookHandle, checkpoint: Mapping[str, Any]) -> None:
    """Load the state of this rank. Collective."""
    if KEY in checkpoint:
        GatheredState(handle).load_state_dict(checkpoint[KEY])
    else:
        warn_of_no_state(handle)
