"""What a transport needs of a codec."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["Codec"]


class Codec(ABC):
    """Turns numbers into messages of a length that depends on nothing but how many they are.

    values    (numel,)         float32 or float64, contiguous
    error     (numel,)         of the dtype of ``values``
    messages  (count, bytes)   uint8, contiguous, of ``encoded_bytes(part_length)`` each

    Values are cut into parts of ``part_length``, one message each; the last ones may have fewer
    values, or none. What is decoded is the same, bit for bit, on every machine. A message of values
    that are not all finite, or so large that sums of them might not be, is not finite.

    All tensors are on one device. Work on a GPU is queued on torch's current stream; nothing
    synchronizes.
    """

    def require(self, device: torch.device) -> None:  # noqa: B027
        """Raises CommHookError, with what to install, if values there cannot be encoded."""

    @abstractmethod
    def encoded_bytes(self, part_length: int) -> int:
        """The length of a message of a part of so many values."""

    @abstractmethod
    def encode(
        self,
        values: Tensor,
        messages: Tensor,
        part_length: int,
        *,
        error: Tensor | None = None,
        seed: int = 0,
        keep_residual: bool = False,
    ) -> None:
        """Writes the messages of the parts of ``values + error``.

        With ``keep_residual``, ``values`` become what the messages leave out: values + error less
        what these are decoded to. Random numbers depend on ``seed``, of 64 bits, and position only.
        """

    @abstractmethod
    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        """Writes the mean of the messages, all of the same part, to ``values``.

        The mean is summed in float32.
        """

    @abstractmethod
    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, *, kept: Tensor | None = None
    ) -> Tensor:
        """Writes what the messages tell of each part; what was there before goes to ``kept``.

        Returns whether all messages are finite: ``(1,)``, bool, on the device. If they are not,
        ``values`` become NaN and ``kept`` stays.
        """
