"""Communication hooks for data-parallel training: named, pluggable, measurable.

::

    model = commhooks.DistributedDataParallel(net)
    handle = commhooks.register(model, "powersgd", rank=4)
    ...
    print(handle.stats())
"""

from commhooks import algorithms
from commhooks.communicator import Communicator
from commhooks.errors import (
    CommHookError,
    CommHookMismatchError,
    CommHookOptionError,
    CommHookPeerError,
    CommHookResultError,
    CommHookStateError,
    UnknownHookError,
)
from commhooks.hook import CommHook
from commhooks.registry import HookInfo, available, create, describe, register_hook
from reducer import DistributedDataParallel, GradBucket

__all__ = [
    "CommHook",
    "CommHookError",
    "CommHookMismatchError",
    "CommHookOptionError",
    "CommHookPeerError",
    "CommHookResultError",
    "CommHookStateError",
    "Communicator",
    "DistributedDataParallel",
    "GradBucket",
    "HookInfo",
    "UnknownHookError",
    "algorithms",
    "available",
    "create",
    "describe",
    "register_hook",
]
