"""The states of all ranks in a checkpoint of the Trainer, which one rank writes."""

import warnings
from collections.abc import Mapping
from typing import Any

from commhooks.adapters.handle import HookHandle
from commhooks.integrations.gathered_state import GatheredState

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
        warnings.warn(
            f"the checkpoint has no state of a hook, so {handle.hook!r} begins without one, at its "
            "first step",
            stacklevel=2,
        )
