"""The state of a hook in ``torch.distributed.checkpoint``.

Note [Load targets]
~~~~~~~~~~~~~~~~~~~
``torch.distributed.checkpoint.load`` fills what ``state_dict()`` returns, and does not tell it what
the checkpoint has. A hook's state begins empty, and its tensors have another size if the number of
ranks was another. Therefore :class:`HookState` reads the metadata of the checkpoint by itself.
Without one, ``load`` would miss the keys of these ranks and give no reason, so the stack tells who
calls.
"""

import os
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from commhooks.errors import CommHookStateError
from commhooks.state.entries import put
from commhooks.state.files import Handle
from commhooks.state.layout import Source, layout_of, of_part
from commhooks.state.saved import NoStateError

if TYPE_CHECKING:  # it takes seconds to import
    from torch.distributed.checkpoint.storage import StorageReader

_FIELDS = ("version", "hook", "step")


class HookState:
    """The state of a hook, for ``torch.distributed.checkpoint``. A ``Stateful``.

    ::

        dcp.save({"model": net, "hook": HookState(handle)}, checkpoint_id=path)
        dcp.load({"model": net, "hook": HookState(handle, path)}, checkpoint_id=path)

    On the same ranks, each gets its own state again, bit for bit. On another number of replicas or
    shards, each replica gets the mean of what the replicas had, so nothing that was to be sent is
    lost. A checkpoint that was saved without hooks is accepted with a warning, and the hook begins
    without a state. ``dcp.async_save`` works as well. All methods are collectives.

    Args:
        handle: The handle of the hook.
        checkpoint: The checkpoint to load: a path, or what ``dcp.load`` gets as its
            ``storage_reader``. It counts for one load: after it, the object saves the state.
        key: The key of the state in the checkpoint, as in "app.hook", if there are several.
    """

    def __init__(
        self,
        handle: Handle,
        checkpoint: "StorageReader | str | os.PathLike[str] | None" = None,
        key: str | None = None,
    ) -> None:
        self.handle = handle
        if isinstance(checkpoint, str | os.PathLike):
            from torch.distributed.checkpoint.filesystem import FileSystemReader

            checkpoint = FileSystemReader(checkpoint)
        self._reader = checkpoint
        self._key = key

    def state_dict(self) -> dict[str, Any]:
        """Return the state, or what to load it into: see Note [Load targets].

        Raises:
            CommHookStateError: ``dcp.load`` calls this, and there is no checkpoint; or it has
                several states.
        """
        if self._reader is None:
            if _is_loading():
                raise CommHookStateError(
                    f"[rank {self.handle.adapter.rank}] expected the checkpoint that dcp.load "
                    "reads, found none: pass it to each load, as HookState(handle, checkpoint)"
                )
            return self.handle.state_dict()
        stored = self._stored()
        model = self.handle.adapter
        found = (Source.of(path[1]) for path in stored if path[0] == "tensors")
        own = of_part((source for source in found if source is not None), model)
        if not own:
            return {}
        old, part = own[0].layout, own[0].part
        sources = set(map(str, old.sources(layout_of(model), model.rank, part)))
        targets: dict[str, Any] = {"state": {source: {} for source in sorted(sources)}}
        if not sources:  # DCP would look for an empty dict in the checkpoint
            del targets["state"]
        for path, it in stored.items():
            if path[0] in _FIELDS:
                put(targets, path, None)
            elif path[1] in sources:
                target = None
                if hasattr(it, "size"):  # a tensor
                    dtype = it.properties.dtype
                    target = torch.empty(it.size, dtype=dtype, device=model.device)
                put(targets, path, target)
        return targets

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``dcp.load`` has read.

        Raises:
            CommHookStateError: See :meth:`HookHandle.load_state_dict`; or the state of the hook
                cannot be used on another number of ranks.
        """
        self._reader = None
        # Of the former run this rank may need no tensors, which all states have.
        state = {"state": {}, "tensors": {}, **state_dict} if state_dict else NoStateError()
        self.handle.load_state_dict(state)  # {} of :meth:`state_dict`

    def _stored(self) -> dict[tuple[Any, ...], Any]:
        """Return what the checkpoint has of the hook, by its path in the state."""
        assert self._reader is not None
        metadata = self._reader.read_metadata()
        paths = metadata.planner_data or {}
        prefixes = {
            path[:-2]
            for path in paths.values()
            if path[-2:-1] == ("tensors",) and Source.of(path[-1])
        }
        if not prefixes:
            return {}
        keys = {".".join(map(str, prefix)): prefix for prefix in sorted(prefixes)}
        key = next(iter(keys)) if self._key is None and len(keys) == 1 else self._key
        if key not in keys:
            raise CommHookStateError(
                f"expected the state of a hook {'' if key is None else f'at {key!r} '}in the "
                f"checkpoint, found {', '.join(map(repr, keys))}; name one of them: "
                "HookState(handle, checkpoint, key=...)"
            )
        start = len(keys[key])
        return {
            path[start:]: metadata.state_dict_metadata[name]
            for name, path in paths.items()
            if path[:start] == keys[key]
        }


def _is_loading() -> bool:
    frames = (frame for frame, _ in traceback.walk_stack(None))
    loader = "torch.distributed.checkpoint.state_dict_loader"
    return any(frame.f_globals.get("__name__") == loader for frame in frames)
