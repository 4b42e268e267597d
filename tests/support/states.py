"""The states of hooks, as tests look at them and change them."""

from typing import Any

__all__ = ["hook_state", "of_rank", "same_state"]


def hook_state(handle: Any) -> dict[str, Any]:
    """Return the state of a registered hook on this rank, after its exchanges."""
    handle.state_dict()
    state: dict[str, Any] = handle.hook.state_dict()
    return state


def of_rank(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a saved state that only its rank has."""
    return next(part for source, part in saved["state"].items() if source.startswith("rank"))


def same_state(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a saved state that all replicas have."""
    return next(part for source, part in saved["state"].items() if source.startswith("shard"))
