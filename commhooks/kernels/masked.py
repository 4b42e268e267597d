"""Launches of masked.cu: a copy that depends on a condition in device memory."""

from torch import Tensor

from commhooks.kernels.launcher import launch, streaming_blocks
from commhooks.kernels.source import Source, kernel_name

SOURCE = Source("masked.cu", (kernel_name("copy_if"),))


def copy_if(condition: Tensor, source: Tensor, out: Tensor) -> None:
    """Copy ``source`` to ``out``, of the same dtype, if ``condition``, () bool, is true."""
    arguments = (condition, source, out.nbytes, out)
    launch(SOURCE, SOURCE.kernels[0], arguments, grid=streaming_blocks(out))
