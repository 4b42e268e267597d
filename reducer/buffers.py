"""Keep the buffers of a module, such as running means, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from reducer.native import Reducer
from reducer.peers import collective

BROADCAST_BYTES = 250 * 2**20
"""The size up to which tensors are broadcast together."""


def broadcast(group: dist.ProcessGroup, tensors: Iterable[Tensor], root: int) -> None:
    """Overwrite tensors with those of the group's rank ``root``. Collective."""
    tensors = [tensor.detach() for tensor in tensors]
    if tensors and group.size() > 1:
        with collective(group, f"the broadcast of {len(tensors)} tensors of rank {root}"):
            _broadcast_coalesced(group, tensors, BROADCAST_BYTES, root)


class ModuleBuffers:
    """The buffers of a module, except the ignored ones; synchronized by a broadcast or a hook.

    Attributes:
        hook: the user's replacement for the broadcast, or None.
        by_name: the buffers by their qualified names.
    """

    def __init__(self, module: nn.Module, ignored: set[str]) -> None:
        self._module = module
        self._ignored = ignored
        self.hook: _BufferCommHook | None = None
        self.by_name: dict[str, Tensor] = {}
        self.collect()

    def collect(self) -> None:
        """Update ``by_name``, because modules may have replaced their buffers."""
        self.by_name = {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if name not in self._ignored
        }

    @property
    def location(self) -> _BufferCommHookLocation:
        """Whether buffers are synchronized before or after forward."""
        if self.hook is None:
            return _BufferCommHookLocation.PRE_FORWARD
        return self.hook.buffer_comm_hook_location

    def sync(self, group: dist.ProcessGroup, root: int, reducer: Reducer) -> None:
        """Copy the buffers of the group's rank ``root`` to all ranks, or call the hook. Collective.

        The next backward of ``reducer`` ends after the futures that the hook returns. The versions
        that autograd checks do not change: a graph that was recorded with the old values stays
        valid.
        """
        self.collect()
        with (
            torch.no_grad(),
            _unsafe_preserve_version_counter(tuple(self.by_name.values())),
        ):
            if self.hook is None:
                broadcast(group, self.by_name.values(), root)
                return
            hook, state = self.hook.buffer_comm_hook, self.hook.buffer_comm_hook_state
            if futures := hook(state, self.by_name):
                reducer.await_after_backward(list(futures))
