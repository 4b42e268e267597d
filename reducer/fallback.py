"""Fallback when ``reducer._C`` is not compiled: GradBucket only."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reducer.extension import ENGINE

__all__ = [
    "AverageHook",
    "GradBucket",
    "HostGroup",
    "NativeHook",
    "NoopHook",
    "Reducer",
    "Transport",
    "has_kernels",
]


class GradBucket:
    """The bucket that a communication hook gets: gradients that are reduced together.

    Has the methods of ``torch.distributed.GradBucket``, from which Python cannot derive.
    """

    def __init__(
        self,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        *,
        index: int = 0,
        is_last: bool = True,
        step: int = 0,
        left_out: Sequence[str] = (),
    ) -> None:
        if len(parameters) != len(names):
            raise ValueError(
                f"Expected one name per parameter of a bucket, found {len(parameters)} parameters "
                f"and {len(names)} names."
            )
        self.lengths = [parameter.numel() for parameter in parameters]
        *self.offsets, expected = itertools.accumulate(self.lengths, initial=0)
        if buffer.shape != (expected,):
            raise ValueError(
                "Expected a bucket buffer with one dimension and one element per gradient element, "
                f"{expected} for these parameters, found shape {list(buffer.shape)}."
            )
        self.names = list(names)
        self.key = _digest(tuple(names))
        self.step = step
        self.left_out = list(left_out)
        self._buffer = buffer
        self._parameters = list(parameters)
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """Return the index among the buckets of this step."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat (numel,) tensor with all gradients of the bucket."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer with another tensor."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return one view of the buffer per parameter, in the layout of the parameter."""
        start = self._buffer.storage_offset()
        return [
            self._buffer.as_strided(parameter.shape, gradient_strides(parameter), start + offset)
            for parameter, offset in zip(self._parameters, self.offsets, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of ``gradients()``."""
        return list(self._parameters)

    def all_finite(self) -> Tensor:
        """Return whether the buffer is finite, () bool on its device, in one pass over it."""
        if self._buffer.numel() == 0:
            return self._buffer.new_ones((), dtype=torch.bool)
        return torch.stack(torch.aminmax(self._buffer)).isfinite().all()

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._is_last

    @property
    def shapes(self) -> list[torch.Size]:
        """Shape of each gradient."""
        return [parameter.shape for parameter in self._parameters]


def gradient_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: Note [Bucket views] in csrc/reducer/layout.h."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


@functools.lru_cache(maxsize=4096)
def _digest(names: tuple[str, ...]) -> str:
    """Return FNV-1a of the names, each with a final NUL, so that {ab, c} and {a, bc} differ."""
    digest = 0xCBF29CE484222325
    for byte in b"".join(name.encode() + b"\0" for name in names):
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return f"{digest:016x}"


class NativeHook:
    """A hook in C++, which only our reducer runs."""


class AverageHook(NativeHook):
    """Stands for the exact average."""

    def __init__(
        self, process_group: Any, wire_dtype: torch.dtype | None = None, name: str = "average"
    ) -> None:
        self.process_group = process_group
        self.wire_dtype = wire_dtype
        self.name = name


class NoopHook(NativeHook):
    """Stands for no communication."""


class _Compiled:
    """A class that annotations name, and that has no objects without the extension."""

    def __init__(self, *_: Any, **__: Any) -> None:
        ENGINE.require(f"reducer.{type(self).__name__}")


class Reducer(_Compiled):
    """There is no reducer in Python."""


class Transport(_Compiled):
    """Hooks use the process group."""


class HostGroup(Transport):
    """No tensor is in memory that ranks share."""

    @staticmethod
    def of(tensor: Tensor) -> None:
        """Return None."""


def has_kernels(device: str) -> bool:  # noqa: ARG001
    """Return False: nothing is compiled."""
    return False
