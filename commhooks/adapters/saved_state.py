"""The state that a handle writes into a checkpoint, and the checks when it is read."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from commhooks.adapters.adapter import Adapter
from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook

__all__ = ["check_saved_state", "saved_state"]

VERSION = 1
_TYPES = {"version": int, "hook": dict, "rank": int, "world_size": int, "step": int, "state": dict}


def saved_state(hook: CommHook, adapter: Adapter) -> dict[str, Any]:
    """Return the hook's state and its origin, in types that ``torch.load`` reads by default."""
    return {
        "version": VERSION,
        "hook": hook.to_config(),
        "rank": adapter.group.rank(),
        "world_size": adapter.group.size(),
        "step": adapter.steps,
        "state": hook.state_dict(),
    }


def check_saved_state(saved: Mapping[str, Any], hook: CommHook, adapter: Adapter) -> None:
    """Raise CommHookStateError unless ``saved`` is from this hook, rank and model."""
    _check_form(saved)
    if saved["version"] > VERSION:
        raise CommHookStateError(
            f"expected a state of version {VERSION}, found {saved['version']}: it was saved by a "
            "later version of commhooks"
        )
    _check_hook(saved, hook)
    if not saved["state"]:
        return  # nothing in it depends on the rank or the model
    here = {"rank": adapter.group.rank(), "world_size": adapter.group.size()}
    there = {name: saved[name] for name in here}
    if there != here:
        raise CommHookStateError(
            f"expected the state of rank {here['rank']} of {here['world_size']}, found that of "
            f"rank {there['rank']} of {there['world_size']}; what has not been sent yet differs by "
            "rank, so every rank saves and loads its own state"
        )
    _check_parameters(saved["state"], hook, adapter)


def _check_form(saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise CommHookStateError(
            f"expected what state_dict() returned, found {type(saved).__name__}"
        )
    for name, kind in _TYPES.items():
        if not isinstance(saved.get(name), kind):
            raise CommHookStateError(
                f"expected {name!r} of type {kind.__name__} in the saved state, found "
                f"{saved.get(name)!r}; did state_dict() of a handle return it?"
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
        return  # without state, other options are harmless
    for path, (wanted, found) in _differences(here, there):
        raise CommHookStateError(
            f"hook {here['name']!r} has {path}={wanted!r}, but its state was saved with "
            f"{path}={found!r}"
        )


def _differences(here: Any, there: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield where two configs differ, e.g. "rank" or "inner.density", with both values."""
    if isinstance(here, dict) and isinstance(there, dict):
        for name in sorted(here.keys() | there.keys()):
            inner = f"{path}.{name}" if path else name
            yield from _differences(here.get(name), there.get(name), inner)
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for i, (wanted, found) in enumerate(zip(here, there, strict=True)):
            yield from _differences(wanted, found, f"{path}.{i}")
    elif here != there:
        yield path, (here, there)


def _check_parameters(
    state: Mapping[str, Any], hook: CommHook, adapter: Adapter, where: str = ""
) -> None:
    """Check the keys of ``state``. ``where``: the nested hook, e.g. " of .inner", if any."""
    nested = {f".{path}": each for path, each in hook.nested().items()}
    for key, tensors in state.items():
        if not (
            key in nested
            or (isinstance(key, str) and hook.knows_state_key(key, adapter.parameters))
        ):
            what = "nested hook" if str(key).startswith(".") else "parameter"
            raise CommHookStateError(
                f"the saved state{where} is of a model with a {what} {key!r}, which this one lacks"
            )
        if not isinstance(tensors, Mapping):
            raise CommHookStateError(
                f"expected tensors by name for {key!r}{where}, found {type(tensors).__name__}"
            )
        if key in nested:
            _check_parameters(tensors, nested[key], adapter, f"{where} of {key}")
        else:
            _check_tensors(tensors, hook.state.get(key, {}), f"{key!r}{where}")


def _check_tensors(tensors: Mapping[str, Any], present: Mapping[str, Tensor], where: str) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise CommHookStateError(
                f"expected a tensor as {name!r} of {where}, found {type(value).__name__}"
            )
        if name in present and present[name].shape != value.shape:
            raise CommHookStateError(
                f"expected {name!r} of {where} in shape {tuple(present[name].shape)}, found "
                f"{tuple(value.shape)}"
            )
