"""What a transport needs of a codec."""

from abc import ABC, abstractmethod

from torch import Tensor

__all__ = ["Codec"]


class Codec(ABC):
    """Turns numbers into messages of a length that depends on nothing but how many they are.

    values    (numel,)         float32 or float64, contiguous
    error     (numel,)         of the dtype of ``values``
    message   (bytes,)         uint8, contiguous, at least ``encoded_bytes(numel)``
    messages  (count, bytes)   one message per row

    What is decoded is the same, bit for bit, on every machine. A message of values that are not all
    finite, or so large that sums of them might not be, is not finite; see :meth:`is_finite`.
    """

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """The length of a message of ``numel`` values."""

    @abstractmethod
    def encode(
        self,
        values: Tensor,
        message: Tensor,
        *,
        error: Tensor | None = None,
        seed: int = 0,
        keep_residual: bool = False,
    ) -> None:
        """Writes the message of ``values + error``, and zeros behind it.

        With ``keep_residual``, ``values`` become what the message leaves out: values + error less
        what it is decoded to. Random numbers depend on ``seed``, of 64 bits, and position only.
        """

    @abstractmethod
    def decode(self, messages: Tensor, values: Tensor, *, kept: Tensor | None = None) -> None:
        """Writes the mean of the messages to ``values``; what these were before goes to ``kept``.

        The mean is summed in float32.
        """

    @abstractmethod
    def is_finite(self, messages: Tensor, numel: int) -> bool:
        """Whether the messages, of ``numel`` values each, can be decoded to finite numbers."""
