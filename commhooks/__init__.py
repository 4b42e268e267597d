"""Communication hooks for data-parallel training: named, pluggable, measurable.

::

    model = commhooks.DistributedDataParallel(net)
    handle = commhooks.register(model, "powersgd", rank=4)
    ...
    print(handle.stats())
"""

from commhooks.extensions import load_extensions
from reducer.extension import unavailable

try:
    load_extensions()
except ImportError as error:
    # `commhooks doctor` still runs. Not a plain `def`, or type checkers would think that the
    # package has any attribute.
    globals()["__getattr__"] = unavailable(error)
else:
    from commhooks import algorithms
    from commhooks.adapters.handle import HookHandle, handle_of, register
    from commhooks.adapters.pair import CommHookState, comm_hook
    from commhooks.adapters.replicas import check_replicas
    from commhooks.adapters.trace import merge_traces
    from commhooks.adapters.wrapper import DistributedDataParallel
    from commhooks.comm.communicator import Communicator
    from commhooks.errors import (
        CommHookError,
        CommHookMismatchError,
        CommHookOptionError,
        CommHookPeerError,
        CommHookResultError,
        CommHookStateError,
        UnknownHookError,
    )
    from commhooks.hook.base import CommHook
    from commhooks.hook.registry import HookInfo, available, create, describe, register_hook
    from commhooks.runtime.stats import BucketStats, HookStats
    from reducer import GradBucket, MixedPrecision, OverlappedOptimizer, overlap_optimizer

__all__ = [
    "BucketStats",
    "CommHook",
    "CommHookError",
    "CommHookMismatchError",
    "CommHookOptionError",
    "CommHookPeerError",
    "CommHookResultError",
    "CommHookState",
    "CommHookStateError",
    "Communicator",
    "DistributedDataParallel",
    "GradBucket",
    "HookHandle",
    "HookInfo",
    "HookStats",
    "MixedPrecision",
    "OverlappedOptimizer",
    "UnknownHookError",
    "algorithms",
    "available",
    "check_replicas",
    "comm_hook",
    "create",
    "describe",
    "handle_of",
    "merge_traces",
    "overlap_optimizer",
    "register",
    "register_hook",
]
