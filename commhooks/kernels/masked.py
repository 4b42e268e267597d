"""Launches of masked.cu: a copy that depends on a condition in device memory."""

from torch import Tensor

from commhooks.kernels.launcher import launch
from commhooks.kernels.source import Source

__all__ = ["SOURCE", "copy_if"]

SOURCE = Source("masked.cu", ("commhooks::kernels::copy_if",))

_THREADS = 256
_BYTES_PER_BLOCK = 16 * _THREADS
_BLOCKS = 2048


def copy_if(condition: Tensor, source: Tensor, out: Tensor) -> None:
    """Copy ``source`` to ``out``, of the same dtype, if ``condition``, () bool, is true."""
    blocks = min(_BLOCKS, -(-out.nbytes // _BYTES_PER_BLOCK))
    arguments = (condition, source, out.nbytes, out)
    launch(SOURCE, SOURCE.kernels[0], arguments, grid=blocks, block=_THREADS)
