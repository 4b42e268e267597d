"""Let rank 0 decide for all ranks. The host waits for no device: a step sends, the next one reads.

Note [One plan]
~~~~~~~~~~~~~~~
A plan that differs between ranks would hang or mix up numbers. So rank 0 decides, by what all ranks
have reported, and the others follow:

    step r      gather the reports         if the step fails, all ranks repeat it
    step r+1    rank 0 decides; broadcast  of its instructions
    step r+2    follow the instructions    which all ranks have, because step r+1 has succeeded

A step that fails, even before it reaches this hook on some rank, is repeated by all ranks under the
same number. So what was sent under the number of the present step is of a failed one.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from commhooks.algorithms.host_copy import HostCopy
from commhooks.comm.communicator import Communicator

_LEAST_BYTES = 1 << 14
_HEADER = 8
"""Bytes of the length at the beginning of a message."""


class Agreement:
    """Gives all ranks what rank 0 decides by their reports, see Note [One plan].

    Messages are padded, so that ranks know the sizes of all. If one is longer, all are sent again
    in the next step, with more padding from then on.

    Args:
        decide: Called on rank 0 with the reports of all ranks and the number of the step.
    """

    def __init__(self, decide: Callable[[Sequence[Any], int], object]) -> None:
        self._decide = decide
        self._bytes = _LEAST_BYTES
        self.begin(None)
        self.cancel()

    def begin(self, report: object) -> None:
        """Send the report from this step on."""
        self.is_open = True
        """Whether ranks have yet to agree."""
        self._message = pickle.dumps(report)
        self._has_gathered = False
        self._sent: tuple[int, int, HostCopy] | None = None
        """The step in which the last message was sent, this rank, and the result."""

    def cancel(self) -> None:
        """Forget what was sent. All ranks have to."""
        self.is_open, self._sent = False, None

    def begin_step(self, step: int) -> Any:
        """Read what the step before has sent. Return what rank 0 has decided, None until then."""
        sent, self._sent = self._sent, None
        if sent is None or sent[0] == step:
            return None
        _, rank, copy = sent
        found, size = bytes(copy.read()), self._bytes
        messages = [found[i : i + size] for i in range(0, len(found), size)]
        longest = _HEADER + max(int.from_bytes(each[:_HEADER]) for each in messages)
        if longest > size:
            self._bytes = 1 << longest.bit_length()  # with space for a somewhat longer one
            return None
        known = [pickle.loads(each[_HEADER:]) for each in messages]  # which ignores the padding
        if self._has_gathered:
            self.cancel()
            return known[0]
        self._has_gathered = True
        self._message = pickle.dumps(self._decide(known, step) if rank == 0 else None)
        return None

    async def send(self, comm: Communicator, device: torch.device) -> None:
        """Send what is due in this step, if anything."""
        if not self.is_open:
            return
        message = len(self._message).to_bytes(_HEADER) + self._message
        tensor = torch.frombuffer(
            bytearray(message[: self._bytes].ljust(self._bytes)), dtype=torch.uint8
        )
        if device.type != "cpu":
            tensor = tensor.pin_memory()  # or the host would wait for the copy
        collective = comm.broadcast if self._has_gathered else comm.all_gather
        found = await collective(tensor.to(device, non_blocking=True))
        self._sent = comm.step, comm.rank, HostCopy(found.view(-1))
