"""The states of hooks as one file per rank, for checkpoints that are folders."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commhooks.adapters.handle import HookHandle
from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook

__all__ = ["load_states", "save_states"]


def save_states(handles: Mapping[str, HookHandle], folder: str | os.PathLike[str]) -> None:
    """Write the states of this rank into ``folder``. Call it on every rank."""
    states = {key: handle.state_dict() for key, handle in _with_state(handles).items()}
    path = _path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(states, unfinished)
    unfinished.replace(path)


def load_states(
    handles: Mapping[str, HookHandle],
    folder: str | os.PathLike[str],
    problem: str | None = None,
) -> None:
    """Load what :func:`save_states` wrote on the same rank. Collective.

    If no rank has a file, training goes on without states, with a warning. ``problem``: why this
    rank cannot load, if the caller knows.

    Raises:
        CommHookStateError: A rank lacks its file, or its state is damaged or of another hook, rank
            or model; on every rank.
    """
    handles = _with_state(handles)
    if not handles:
        return
    path = _path(folder)
    states, found = _read(path, set(handles))
    problem = problem or found
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if set(problems) == {_MISSING}:
        warnings.warn(
            f"{folder} was saved without the states of hooks: what they had not sent is lost",
            stacklevel=2,
        )
        return
    if any(problems):
        rank = next(rank for rank, each in enumerate(problems) if each)
        raise CommHookStateError(
            f"[rank {dist.get_rank()}] rank {rank} cannot load {_path(folder, rank)}: "
            f"{problems[rank]}. Each rank needs the file that it saved; no rank has loaded one"
        )
    for key, handle in handles.items():
        handle.load_state_dict(states[key])


_MISSING = "there is no such file"


def _read(path: Path, expected: set[str]) -> tuple[dict[str, Any], str | None]:
    """Return the states, or why there are none."""
    if not path.exists():
        return {}, _MISSING
    try:
        states = torch.load(path)
        found = set(states)
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}"
    if found != expected:
        return {}, f"expected the states of models {sorted(expected)}, found {sorted(found)}"
    return states, None


def _path(folder: str | os.PathLike[str], rank: int | None = None) -> Path:
    return Path(folder) / f"commhooks_{dist.get_rank() if rank is None else rank}.pt"


def _with_state(handles: Mapping[str, HookHandle]) -> dict[str, HookHandle]:
    """Leave out torch-style functions, whose state is not known."""
    return {key: each for key, each in handles.items() if isinstance(each.hook, CommHook)}
