"""The state that a handle writes into a checkpoint, and the checks when it is read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commhooks.adapters.adapter import Adapter
from commhooks.adapters.one_rank import OfOneRank
from commhooks.adapters.state_entries import states_of_hooks
from commhooks.comm.agreement import values_of_ranks
from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook

__all__ = ["Loaded", "check_saved_state", "compare", "loaded", "saved_state"]

VERSION = 1
_TYPES = {"version": int, "hook": dict, "rank": int, "world_size": int, "step": int, "state": dict}
_MOST_STEPS = 2**62  # the reducer counts in 64 bits


def saved_state(hook: CommHook, adapter: Adapter) -> dict[str, Any]:
    """Return the hook's state and its origin, in types that ``torch.load`` reads by default."""
    rank = adapter.rank
    return {
        "version": VERSION,
        "hook": hook.to_config(),
        "rank": rank,
        "world_size": adapter.world_size,
        "step": adapter.steps,
        "state": hook.state_dict(),
        "saved_per_rank": OfOneRank({rank}),
    }


def check_saved_state(saved: Mapping[str, Any], hook: CommHook, adapter: Adapter) -> None:
    """Raise CommHookStateError unless ``saved`` is from this hook, rank and model."""
    _check_form(saved)
    if saved["version"] != VERSION:
        raise CommHookStateError(
            f"expected a state of version {VERSION}, found {saved['version']}: it was saved by a "
            "later version of commhooks"
        )
    _check_hook(saved, hook)
    if not saved["state"]:
        return  # nothing in it depends on the rank or the model
    here = {"rank": adapter.rank, "world_size": adapter.world_size}
    there = {name: saved[name] for name in here}
    if there != here:
        raise CommHookStateError(
            f"expected the state of rank {here['rank']} of {here['world_size']}, found that of "
            f"rank {there['rank']} of {there['world_size']}; what has not been sent yet differs by "
            "rank, so every rank saves and loads its own state. For another number of ranks, save "
            "commhooks.integrations.checkpoint.HookState(handle) with torch.distributed.checkpoint"
        )
    for part in states_of_hooks(saved["state"], hook, adapter.parameters):
        part.check()


@dataclass(frozen=True)
class Loaded:
    """What one rank has loaded, to be compared with the other ranks."""

    failure: str = ""
    """Why it has loaded nothing."""
    step: int = 0
    same_fields: Mapping[str, Sequence[tuple[str, str, tuple[int, ...]]]] = field(
        default_factory=dict
    )
    """Key, name and shape of the fields that all ranks must have, by the path of the hook."""


def loaded(saved: Mapping[str, Any], hook: CommHook, adapter: Adapter) -> Loaded:
    """Describe a state that has been checked."""
    parts = states_of_hooks(saved["state"], hook, adapter.parameters)
    return Loaded("", saved["step"], {p.path: p.same_fields() for p in parts if p.gradients})


def compare(own: Loaded, adapter: Adapter) -> None:
    """Raise CommHookStateError on all ranks if one has failed, or states do not fit together."""
    of_ranks = values_of_ranks(own, adapter.group, adapter.device, "the loading of a saved state")
    if problem := adapter.any_of_rows(_mismatch(of_ranks)):
        raise CommHookStateError(f"[rank {adapter.rank}] {problem}. No rank has loaded its state")


def _mismatch(of_ranks: Sequence[Loaded]) -> str | None:
    same_fields: dict[str, tuple[int, Any]] = {}  # by path, of the first rank that has the hook
    for rank, each in enumerate(of_ranks):
        if each.failure:
            return f"rank {rank} refused its state: {each.failure}"
        if each.step != of_ranks[0].step:
            return (
                f"expected states of the same step on all ranks, found step {of_ranks[0].step} on "
                f"rank 0 and {each.step} on rank {rank}"
            )
        for path, fields in each.same_fields.items():
            first, expected = same_fields.setdefault(path, (rank, fields))
            if fields != expected:
                key, name, shape = min(set(fields) ^ set(expected))
                return (
                    f"the states of ranks {first} and {rank} do not match: only one of them has "
                    f"{name!r} of {key!r} in shape {shape}"
                )
    return None


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
    if not 0 <= saved["step"] < _MOST_STEPS:
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
        for name in sorted(here.keys() | there.keys(), key=str):
            inner = f"{path}.{name}" if path else name
            yield from _differences(here.get(name), there.get(name), inner)
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for i, (wanted, found) in enumerate(zip(here, there, strict=True)):
            yield from _differences(wanted, found, f"{path}.{i}")
    elif here != there:
        yield path, (here, there)
