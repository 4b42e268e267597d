"""Kernels for GPUs: CUDA sources, and the code that compiles and launches them.

:mod:`commhooks.kernels.source` lists the kernels of each ``.cu`` file that are used. What computes
something on a CPU and on a GPU launches them.
"""

from commhooks.kernels.launcher import BACKENDS, kernel_backend_of, launch, require, require_for
from commhooks.kernels.source import SOURCES, Source

__all__ = ["BACKENDS", "SOURCES", "Source", "kernel_backend_of", "launch", "require", "require_for"]
