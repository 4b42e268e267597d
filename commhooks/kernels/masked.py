"""Launches of masked.cu: changes that a verdict on the device decides about."""

from torch import Tensor

from commhooks.kernels.launcher import launch
from commhooks.kernels.source import Source

__all__ = ["SOURCE", "copy_if"]

SOURCE = Source("masked.cu", ("commhooks::kernels::copy_if",))

_THREADS = 256
_BYTES_PER_BLOCK = 16 * _THREADS
_BLOCKS = 2048


def copy_if(verdict: Tensor, source: Tensor, out: Tensor) -> None:
    """``out`` becomes ``source``, of the same type, where the verdict, () bool, is true."""
    blocks = min(_BLOCKS, -(-out.nbytes // _BYTES_PER_BLOCK))
    arguments = (verdict, source, out.nbytes, out)
    launch(SOURCE, SOURCE.kernels[0], arguments, grid=blocks, block=_THREADS)
