"""The engine: ``reducer._C``, or what works without it where it is not compiled.

This is the place that chooses: Note [Without extensions] in reducer/extension.py.
"""

from typing import TYPE_CHECKING

from reducer.extension import ENGINE

if TYPE_CHECKING or ENGINE.is_compiled:
    from reducer._C import *  # noqa: F403
else:
    from reducer.fallback import *  # noqa: F403
