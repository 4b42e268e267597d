"""The states of all ranks in checkpoints of the Trainer and of Fabric, which one rank writes."""

import warnings
from collections.abc import Mapping
from typing import Any

from commhooks.adapters.handle import HookHandle
from commhooks.hook.base import CommHook
from commhooks.integrations.gathered_state import GatheredState

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
        warnings.warn(
            f"the checkpoint has no state of a hook, so {handle.hook!r} begins without one, at its "
            "first step",
            stacklevel=2,
        )
