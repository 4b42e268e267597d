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
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

import torch

from commhooks.algorithms.host_copy import HostCopy
from commhooks.comm.communicator import Communicator

_Answer = TypeVar("_Answer")
_Steps = Generator[tuple[str, bytes], tuple[int, bytes], Any]
"""Yields a collective and its message. Gets its result, and the step in which it is read."""
_LEAST_BYTES = 1 << 14
_HEADER = 8
"""Bytes of the length at the beginning of a message."""


class Agreement(Generic[_Answer]):
    """Gives all ranks what rank 0 decides by their reports, see Note [One plan].

    Messages are padded, so that ranks know the sizes of all. If one is longer, all are sent again
    in the next step, with more padding from then on.

    Args:
        decide: Called on rank 0 with the reports of all ranks and the number of the step.
    """

    def __init__(self, decide: Callable[[Sequence[Any], int], _Answer]) -> None:
        self._decide = decide
        self._bytes = _LEAST_BYTES
        self._steps: _Steps | None = None
        self._message: tuple[str, bytes]
        self._sent: tuple[int, HostCopy] | None = None
        """The result of the last message, and in which step it was sent."""

    @property
    def is_open(self) -> bool:
        """Whether ranks have yet to agree."""
        return self._steps is not None

    def begin(self, report: object, *, rank: int) -> None:
        """Send the report from this step on."""
        self._steps = self._agree(pickle.dumps(report), rank)
        self._message = next(self._steps)

    def cancel(self) -> None:
        """Forget what was sent. All ranks have to."""
        self._steps = self._sent = None

    def begin_step(self, step: int) -> _Answer | None:
        """Read what the step before has sent. Return what rank 0 has decided when it is there."""
        sent, self._sent = self._sent, None
        if self._steps is None or sent is None or sent[0] == step:
            return None
        try:
            self._message = self._steps.send((step, bytes(sent[1].read())))
        except StopIteration as stop:
            self._steps = None
            answer: _Answer = stop.value
            return answer
        return None

    async def send(self, comm: Communicator, device: torch.device) -> None:
        """Send what is due in this step, if anything."""
        if self._steps is None:
            return
        operation, message = self._message
        tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if device.type != "cpu":
            tensor = tensor.pin_memory()  # or the host would wait for the copy
        collective = comm.all_gather if operation == "all_gather" else comm.broadcast
        found = await collective(tensor.to(device, non_blocking=True))
        self._sent = comm.step, HostCopy(found.view(-1))

    def _agree(self, report: bytes, rank: int) -> _Steps:
        step, reports = yield from self._transfer("all_gather", report)
        decided = self._decide(list(map(pickle.loads, reports)), step) if rank == 0 else None
        _, (answer,) = yield from self._transfer("broadcast", pickle.dumps(decided))
        return pickle.loads(answer)

    def _transfer(self, operation: str, own: bytes) -> _Steps:
        """Return the step in which the messages are there, and the messages."""
        own = len(own).to_bytes(_HEADER) + own
        while True:
            size = self._bytes
            step, found = yield operation, own[:size].ljust(size)
            messages = [found[i : i + size] for i in range(0, len(found), size)]
            longest = _HEADER + max(int.from_bytes(each[:_HEADER]) for each in messages)
            if longest <= size:
                return step, [each[_HEADER:] for each in messages]  # pickle ignores the padding
            self._bytes = 1 << longest.bit_length()  # with space for a somewhat longer one
