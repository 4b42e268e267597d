"""Arithmetic of hooks on a CPU: ``commhooks._C``, or the same in torch where it is not compiled.

This is the place that chooses: Note [Without extensions] in reducer/extension.py.
"""

from typing import TYPE_CHECKING

from commhooks.extensions import KERNELS

if TYPE_CHECKING or KERNELS.is_compiled:
    from commhooks._C import *  # noqa: F403
else:
    from commhooks.fallback import *  # noqa: F403
