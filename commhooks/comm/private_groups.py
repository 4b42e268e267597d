"""Communicators of a hook's own, on a backend that completes collectives in order, such as NCCL.

Collectives of all ranks within a step go through the model's process group. Two kinds cannot:
those among some of its ranks, and exchanges, which go on beside the next steps and would keep them
waiting.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookError
from reducer.backends import GLOO, NCCL, connect_like, family_of
from reducer.peers import call_within

_MAX_CTAS = 8
"""Thread blocks of a communicator: each has channels, with buffers in the memory of the device."""


class PrivateGroups(StageGroups):
    """Process groups of the model's backend, one per subgroup, connected on first use.

    One stage suffices, because the backend keeps the order.
    """

    def __init__(
        self, group: dist.ProcessGroup, token: int, device: torch.device, *, purpose: str = "steps"
    ) -> None:
        if (backend := family_of(group, device)) not in (GLOO, NCCL):
            raise CommHookError(
                "exchanges, and collectives among some of the ranks, need communicators of their "
                f"own, on gloo or nccl; the model's process group uses {backend!r}"
            )
        self._device = device
        super().__init__(group, token, device, purpose=purpose)

    def close(self) -> None:
        """End the communicators. Nothing may be under way on them."""
        super().close()
        for groups in self._groups.values():
            for group in groups:
                group.shutdown()  # its destructor would abort them
        self.disconnect()

    def _make_group(self, store: Store, ranks: tuple[int, ...]) -> Any:
        options = _options_like(self._backend.options)
        options.group_name = f"{self._prefix} among {','.join(map(str, ranks))}"  # in logs

        place = ranks.index(self._rank), len(ranks)
        return call_within(
            self._timeout.total_seconds(),
            lambda: connect_like(self._backend, store, *place, options, self._device),
        )


def _options_like(options: Any) -> Any:
    """Return options of a new process group, with the time-out and the limits of another.

    ``split_from`` and ``split_color`` are left out: NCCL would make the new communicator by a
    collective of all ranks of the parent, with members that the parent's color chooses.
    """
    found = type(options)()
    for name in ("_timeout", "_devices", "_threads", "is_high_priority_stream", "config"):
        if hasattr(options, name):
            setattr(found, name, getattr(options, name))
    if hasattr(found, "config") and not 0 < found.config.max_ctas < _MAX_CTAS:
        found.config.max_ctas = _MAX_CTAS
        found.config.min_ctas = min(found.config.min_ctas, _MAX_CTAS)  # NCCL rejects a larger one
    return found
