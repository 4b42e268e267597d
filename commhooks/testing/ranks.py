"""Run a function on several ranks, each in its own process, and return the results.

The processes are kept and reused by later calls. Each call gets a new default process group, so
nothing is carried over from one call to the next.
"""

import atexit
import gc
import os
import random
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from commhooks.cluster import RankPool
from commhooks.cluster.group import join_group, local_store

_SEED = 20190530  # the same on all ranks; tests that need different inputs add the rank

_pool = RankPool()
atexit.register(_pool.close)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args, **kwargs)`` on every rank; return the results by rank.

    ``fn`` is a module-level function whose arguments and result can be pickled. It runs inside a
    new default process group of ``backend``, with one thread per rank, torch's generator seeded
    alike on all ranks, and the warning filters of the caller.

    Raises:
        Exception: the first error of any rank, of its own type if that can be pickled, with the
            rank and the remote traceback as a note.
        TimeoutError: after ``timeout`` seconds, with the stacks of the ranks still running.
        RankError: a rank died.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, found {world_size}")
    store = local_store()
    return _pool.run(
        _run_in_group,
        world_size,
        (fn, world_size, backend, store.port, timeout, *args),
        kwargs,
        timeout=timeout,
        after=_leave_group,
    )


def close_ranks() -> None:
    """End all rank processes; the next :func:`run_ranks` starts new ones."""
    _pool.close()


def _run_in_group(
    rank: int,
    fn: Callable[..., Any],
    world_size: int,
    backend: str,
    port: int,
    timeout: float,
    *args: Any,
    **kwargs: Any,
) -> Any:
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    torch.set_num_threads(1)
    join_group(rank, world_size, "127.0.0.1", port, timeout, backend=backend)
    with patch.dict(os.environ):  # the next call has the environment from before
        return fn(rank, world_size, *args, **kwargs)


def _leave_group() -> None:
    gc.collect()
    if dist.is_initialized():
        # The destructor waits 20 ms for the threads of Gloo, or longer for a lost peer. The next
        # call, which has a group of its own, need not.
        references = [dist.group.WORLD]
        dist.destroy_process_group()
        threading.Thread(target=references.clear, daemon=True).start()
