"""Kernels for GPUs: CUDA sources, and the code that compiles and launches them.

Each ``name.cu`` has a ``name.py`` beside it, in which ``SOURCE`` lists the kernels that are used.
"""

from commhooks.kernels.launcher import BACKENDS, Backend, backend_of, launch, require
from commhooks.kernels.source import Source

__all__ = ["BACKENDS", "Backend", "Source", "backend_of", "launch", "require"]
