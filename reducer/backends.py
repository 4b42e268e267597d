"""The backends of process groups: the only place that knows them by name.

Note [Backends]
~~~~~~~~~~~~~~~
A backend belongs to a family, whose promises are relied on, and which ``CommHook.backends`` names:

    gloo    Threads of the host send from host memory. Collectives of one group complete in any
            order. The host waits for them, so ranks can agree that a step has failed.
    nccl    Collectives keep the order of a stream of the device. The host only enqueues them.
    other   A family of its own, by the name of the backend; it is treated as if it kept the order.

From torch 2.15 on, "nccl" makes a ``ProcessGroupNCCL2``, named "nccl2", unless
TORCH_DIST_USE_NCCL2=0. It is no subclass of ``ProcessGroupNCCL``, whose options it takes.
"nccl-lazy" adds a communicator for each pair that sends and receives. In the sources of 2.15.0,
which have not run here on a device:

    device    The constructor takes one, and connects to peers; the first collective of another
              device raises. A failed constructor without a driver aborts the process.
    split     ``new_group`` splits the parent with ``ncclCommSplit``, by a collective of all its
              ranks. Communicators of our own are bootstrapped through the store instead.
    failure   A watchdog looks once a second. After a time-out or an error of NCCL it does what
              TORCH_NCCL_ASYNC_ERROR_HANDLING says, by default ``abort()`` of the process, after
              abort hooks, such as the flight recorder's. Until then, collectives raise RuntimeError
              ("NCCL operation timed out", "NCCL Async Error"), ``wait`` DistBackendError.
              TORCH_NCCL_BLOCKING_WAIT=1: no watchdog; ``wait`` aborts the communicator and raises.
    future    ``Work.get_future`` makes the current stream wait for the collective at once.
    recorder  The group attaches a hook for the flight recorder; communicators of our own, which are
              no groups, do not appear in it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

GLOO = "gloo"
NCCL = "nccl"

_BINDS_DEVICE = ("nccl2", "nccl-lazy")  # in the constructor
_FAMILIES = {GLOO: GLOO} | dict.fromkeys((NCCL, *_BINDS_DEVICE), NCCL)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of ``group`` for tensors on ``device``, without what checks its calls.

    Raises RuntimeError if there is none. A group that is written in Python has none.
    """
    backend = group._get_backend(device)  # noqa: SLF001
    return getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL


def family_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the family of the backend of ``group`` for tensors on ``device``: Note [Backends]."""
    try:
        return family_named(backend_of(group, device).name())
    except RuntimeError:
        return family_named(group.name())


def family_named(backend: str) -> str:
    """Return the family of the backend of this name."""
    return _FAMILIES.get(backend, backend)


def connect_like(
    backend: Any, store: Store, rank: int, size: int, options: Any, device: torch.device
) -> Any:
    """Return another communicator of the kind of ``backend``, connected for ``device``."""
    bound = (device,) if backend.name() in _BINDS_DEVICE else ()
    group = type(backend)(store, rank, size, options, *bound)
    # Otherwise the first collective would connect, and nothing could end its wait for a peer that
    # fails to connect.
    group.eager_connect_single_device(device)
    return group
