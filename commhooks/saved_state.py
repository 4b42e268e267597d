"""What a handle writes into a checkpoint, and how it recognises what it can read."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from commhooks.errors import CommHookStateError
from commhooks.hook import CommHook
from commhooks.slot import Slot

__all__ = ["check_saved_state", "saved_state"]

VERSION = 1
_TYPES = {"version": int, "hook": dict, "rank": int, "world_size": int, "step": int, "state": dict}


def saved_state(hook: CommHook, slot: Slot) -> dict[str, Any]:
    """The hook's state, with whose it is. Made of what ``torch.load`` reads by default."""
    return {
        "version": VERSION,
        "hook": hook.to_config(),
        "rank": slot.group.rank(),
        "world_size": slot.group.size(),
        "step": slot.steps,
        "state": hook.state_dict(),
    }


def check_saved_state(saved: Mapping[str, Any], hook: CommHook, slot: Slot) -> None:
    """Raises CommHookStateError unless ``saved`` is of this hook, rank and model."""
    _check_form(saved)
    if saved["version"] > VERSION:
        raise CommHookStateError(
            f"expected a state of version {VERSION}, found {saved['version']}: it was saved by a "
            "later version of commhooks"
        )
    _check_hook(saved, hook)
    if not saved["state"]:
        return  # nothing in it belongs to a rank or model
    here = {"rank": slot.group.rank(), "world_size": slot.group.size()}
    there = {name: saved[name] for name in here}
    if there != here:
        raise CommHookStateError(
            f"expected the state of rank {here['rank']} of {here['world_size']}, found that of "
            f"rank {there['rank']} of {there['world_size']}; what was not sent yet is each rank's "
            "own, so every rank saves and loads its own state"
        )
    _check_parameters(saved["state"], hook, slot)


def _check_form(saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise CommHookStateError(f"expected what state_dict() gave, found {type(saved).__name__}")
    for name, kind in _TYPES.items():
        if not isinstance(saved.get(name), kind):
            raise CommHookStateError(
                f"expected {name!r} of type {kind.__name__} in the saved state, found "
                f"{saved.get(name)!r}; is it what state_dict() of a handle gave?"
            )
    if saved["step"] < 0:
        raise CommHookStateError(f"expected a step of at least 0, found {saved['step']}")


def _check_hook(saved: Mapping[str, Any], hook: CommHook) -> None:
    here, there = hook.to_config(), saved["hook"]
    if there.get("name") != here["name"]:
        raise CommHookStateError(
            f"expected the state of hook {here['name']!r}, found that of {there.get('name')!r}"
        )
    if not saved["state"]:
        return  # other options do no harm
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise CommHookStateError(
                f"hook {here['name']!r} has {name}={here.get(name)!r}, but its state was saved "
                f"with {name}={there.get(name)!r}"
            )


def _check_parameters(state: Mapping[str, Any], hook: CommHook, slot: Slot) -> None:
    for key, tensors in state.items():
        if not (isinstance(key, str) and hook.knows_state_key(key, slot.parameters)):
            raise CommHookStateError(
                f"the saved state is of a model with a parameter {key!r}, which this one lacks"
            )
        if not isinstance(tensors, Mapping):
            raise CommHookStateError(
                f"expected tensors by name for {key!r}, found {type(tensors).__name__}"
            )
        present = hook.state.get(key, {})
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise CommHookStateError(
                    f"expected a tensor as {name!r} of {key!r}, found {type(value).__name__}"
                )
            if name in present and present[name].shape != value.shape:
                raise CommHookStateError(
                    f"expected {name!r} of {key!r} in shape {tuple(present[name].shape)}, found "
                    f"{tuple(value.shape)}"
                )
