"""What runs on GPUs: CUDA sources, and how they are compiled and launched.

Each ``name.cu`` here has a ``name.py`` beside it, whose ``SOURCE`` lists the kernels that are used.

Imports: _C, errors, precision.
"""

from commhooks.kernels.launcher import BACKENDS, Backend, backend_of, launch, require
from commhooks.kernels.source import Source

__all__ = ["BACKENDS", "Backend", "Source", "backend_of", "launch", "require"]
