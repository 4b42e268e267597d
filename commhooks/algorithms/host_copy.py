"""Numbers of a device on their way to the host, which reads them later."""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor, queued on the current stream, that the host reads in a later step.

    All ranks must read it in the same step, so :meth:`read` waits until the copy is there. It is
    there at once unless the host is that many steps ahead of the device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._copy = tensor.clone()
        else:
            self._copy = tensor.to("cpu", non_blocking=True)  # in pinned memory
            self._event = torch.Event(device=tensor.device)
            self._event.record()

    def read(self) -> Any:
        """Return the number, or lists of numbers."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy.tolist()
