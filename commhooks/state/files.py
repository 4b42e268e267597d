"""The states of hooks in files: one that rank 0 writes, or one per rank."""

import os
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook
from commhooks.state.entries import on_cpu
from commhooks.state.layout import DistributedModel
from commhooks.state.saved import NoStateError
from reducer.backends import GLOO, family_of

KEY = "commhooks"
"""The key of the state in the checkpoints of other libraries."""


class Handle(Protocol):
    """The methods used of a :class:`HookHandle`."""

    @property
    def hook(self) -> Any: ...

    @property
    def is_registered(self) -> bool: ...

    @property
    def adapter(self) -> DistributedModel: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any] | CommHookStateError, /) -> None: ...


class GatheredState:
    """The state of a hook on all ranks, for checkpoints that one rank writes and all ranks read.

    ::

        state = {"model": net.state_dict(), "hook": GatheredState(handle).state_dict()}
        if rank == 0:
            torch.save(state, path)
        ...
        handle.load_state_dict(torch.load(path)["hook"])

    The number of ranks may be another one when it is loaded, as with :class:`HookState`. The memory
    of each rank must hold the states of all.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, and nothing on the others. Collective.

        In host memory: rank 0 may lack the devices of the other ranks, or the memory there.
        """
        own: dict[str, Any] = on_cpu(self.handle.state_dict())
        states: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with _group_on_cpu() as group:
            dist.gather_object(own, states, group_dst=0, group=group)
        if states is None:
            return {}
        merged: dict[str, dict[str, Any]] = {name: {} for name in ("state", "tensors")}
        for name, whole in merged.items():
            for each in states:
                whole.update(each[name])
        return own | merged

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call :meth:`HookHandle.load_state_dict`. Collective."""
        self.handle.load_state_dict(state)


def add_state(handle: Handle, checkpoint: dict[str, Any]) -> None:
    """Add the states of all ranks, if the hook has any: :func:`_has_state`. Collective."""
    if _has_state(handle):
        checkpoint[KEY] = GatheredState(handle).state_dict()


def load_state_of(handle: Handle, checkpoint: Mapping[str, Any], key: str = KEY) -> None:
    """Load what :func:`add_state` added. Collective."""
    if _has_state(handle):
        handle.load_state_dict(checkpoint.get(key) or NoStateError())


def save_states(handles: Mapping[str, Handle], folder: str | os.PathLike[str]) -> None:
    """Write the states of this rank into ``folder``. Call it on every rank."""
    states = {key: handle.state_dict() for key, handle in _with_state(handles).items()}
    path = _path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(states, unfinished)
    unfinished.replace(path)


def load_states(handles: Mapping[str, Handle], folder: str | os.PathLike[str]) -> None:
    """Load what :func:`save_states` wrote on the same rank. Collective.

    Raises:
        CommHookStateError: See :meth:`HookHandle.load_state_dict`; or a rank lacks its file, or it
            is damaged. If all ranks lack it, that is a warning.
    """
    handles = _with_state(handles)
    states = _read(_path(folder), handles.keys())
    for key, handle in handles.items():
        handle.load_state_dict(states[key])


def _read(path: Path, keys: Set[str]) -> dict[str, Any]:
    """Return the states, or in place of each why there are none."""
    if not path.exists():
        return dict.fromkeys(keys, NoStateError(f"there is no file {path}"))
    try:
        states: dict[str, Any] = torch.load(path, map_location="cpu")
        if states.keys() == keys:
            return states
        problem = f"expected states of {sorted(keys)}, found {sorted(states)}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    text = f"cannot load {path}: {problem}. Each rank needs the file that it saved"
    return dict.fromkeys(keys, CommHookStateError(text))


def _path(folder: str | os.PathLike[str]) -> Path:
    return Path(folder) / f"commhooks_{dist.get_rank()}.pt"


def _with_state(handles: Mapping[str, Handle]) -> dict[str, Handle]:
    return {key: each for key, each in handles.items() if _has_state(each)}


def _has_state(handle: Handle) -> bool:
    """Return whether there is a hook, and no torch-style function, which keeps its own state."""
    return handle.is_registered and isinstance(handle.hook, CommHook)


@contextmanager
def _group_on_cpu() -> Iterator[dist.ProcessGroup]:
    """Yield a group of all ranks that need not copy objects to a GPU."""
    world = dist.group.WORLD
    assert world is not None
    if family_of(world, torch.device("cpu")) == GLOO:
        yield world
        return
    group = dist.new_group(backend=GLOO)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
