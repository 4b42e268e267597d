"""Saves the state of a hook with torch.distributed.checkpoint, and loads it on any ranks.

Note [Load targets]
~~~~~~~~~~~~~~~~~~~
``torch.distributed.checkpoint`` fills what ``state_dict()`` returns, and does not tell it what the
checkpoint has. A hook's state begins empty, and its tensors have another size if the number of
ranks was another. Therefore :meth:`HookState.state_dict` looks for ``load()`` among its callers,
and asks its reader for the metadata of the checkpoint. Called by anything else, it returns the
state as it is.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from commhooks.adapters.handle import HookHandle
from commhooks.adapters.spread_state import SpreadState
from commhooks.errors import CommHookStateError
from commhooks.integrations.gathered_state import GatheredState, warn_of_no_state

__all__ = ["GatheredState", "HookState"]

_ABOUT = "about_hook"
_LOADER = "torch.distributed.checkpoint.state_dict_loader"


class HookState:
    """The state of a hook, for ``torch.distributed.checkpoint``. A ``Stateful``.

    ::

        dcp.save({"model": net, "hook": HookState(handle)}, checkpoint_id=path)
        dcp.load({"model": net, "hook": HookState(handle)}, checkpoint_id=path)

    On the same ranks, each gets its own state again, bit for bit. On another number of replicas or
    shards, each replica gets the mean of what the replicas had, so nothing that was to be sent is
    lost. A checkpoint that was saved without hooks is accepted with a warning, and the hook begins
    without a state. ``dcp.async_save`` works as well. All methods are collectives.
    """

    def __init__(self, handle: HookHandle) -> None:
        self.handle = handle
        self._knows_checkpoint = False  # that is loaded; a rank may need nothing of it

    def state_dict(self) -> dict[str, Any]:
        """Return the state, or what to load it into: see Note [Load targets]."""
        state = self._spread()
        source = _checkpoint_that_is_loaded()
        if source is None:
            saved = self.handle.state_dict()
            return {_ABOUT: _about(saved), **state.save(saved["state"])}
        prefix, metadata = source
        self._knows_checkpoint = True
        if prefix is None:
            return {}
        found = {
            key.removeprefix(prefix): it
            for key, it in metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(it, TensorStorageMetadata)
        }
        return {_ABOUT: "", **state.targets(found)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``dcp.load`` has read.

        Raises:
            CommHookStateError: See :meth:`HookHandle.load_state_dict`; or the state of the hook
                cannot be used on another number of ranks.
        """
        if not state_dict:  # what state_dict() returned for a checkpoint without hooks
            warn_of_no_state(self.handle)
            state_dict = {_ABOUT: _about(self.handle.state_dict() | {"step": 0, "state": {}})}
        about = json.loads(state_dict[_ABOUT])
        fields = {name: it for name, it in state_dict.items() if name != _ABOUT}
        if about.pop("has_state") and not fields and not self._knows_checkpoint:
            raise CommHookStateError(
                "nothing was read of the state of the hook: state_dict() has to be called by "
                "torch.distributed.checkpoint.load(), which asks each Stateful in its dict"
            )
        adapter = self.handle.adapter
        state = self._spread().load(fields)
        here = {"rank": adapter.rank, "world_size": adapter.world_size}
        self.handle.load_state_dict(about | here | {"state": state})

    def _spread(self) -> SpreadState:
        return SpreadState(self.handle.stateful_hook(), self.handle.adapter)


def _about(saved: Mapping[str, Any]) -> str:
    about = {name: saved[name] for name in ("version", "hook", "world_size", "step")}
    return json.dumps(about | {"has_state": bool(saved["state"])})


def _checkpoint_that_is_loaded() -> tuple[str | None, Metadata] | None:
    """Return the keys' prefix and the metadata if ``dcp.load`` is among the callers.

    The prefix is None if the checkpoint was saved without hooks.
    """
    for frame in _callers():
        if frame.f_code.co_name == "load" and frame.f_globals.get("__name__") == _LOADER:
            found = frame.f_locals
            metadata = found["storage_reader"].read_metadata()
            return _prefix(metadata, found["key"]), metadata
    return None


def _callers() -> Iterator[Any]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _prefix(metadata: Metadata, key: str) -> str | None:
    hooks = [name for name in metadata.state_dict_metadata if name.endswith(f".{_ABOUT}")]
    ends = [name for name in hooks if name.startswith(f"{key}.")]
    if not hooks:
        return None
    if len(ends) != 1:
        raise CommHookStateError(
            f"expected the state of one hook below {key!r} in the checkpoint, found {len(ends)}, "
            f"of {', '.join(hooks)}; give dcp.save and dcp.load a dict in which each HookState has "
            "a key of its own, the same in both"
        )
    return ends[0].removesuffix(_ABOUT)
