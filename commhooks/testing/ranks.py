"""Runs a function on several ranks, each in a process of its own, and gives back what they return.

Processes are kept and used again by later calls. Each call gets a default process group of its own,
so nothing is carried over from one call to the next.
"""

import atexit
import gc
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from commhooks.cluster.call import Call
from commhooks.cluster.pool import RankError, RankPool

__all__ = ["RankError", "close_ranks", "run_ranks"]

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
    """Runs ``fn(rank, world_size, *args, **kwargs)`` on every rank; returns the results by rank.

    ``fn`` is a module-level function, its arguments and its result can be pickled. It runs inside a
    fresh default process group of ``backend``, with one thread per rank, torch's generator seeded
    alike on all ranks, and the warning filters of the caller.

    Raises:
        Exception: the first error of any rank, of its own type where that can be pickled, with the
            rank and the remote traceback as a note.
        TimeoutError: after ``timeout`` seconds, with the stacks of the ranks still running.
        RankError: a rank died.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, found {world_size}")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    calls = [
        Call(
            _in_a_group,
            (fn, rank, world_size, backend, store.port, timeout, *args),
            kwargs,
            timeout,
            after=_leave_group,
        )
        for rank in range(world_size)
    ]
    return _pool.run(calls, timeout)


def close_ranks() -> None:
    """Ends all worker processes; the next :func:`run_ranks` starts fresh ones."""
    _pool.close()


def _in_a_group(
    fn: Callable[..., Any],
    rank: int,
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
    seconds = timedelta(seconds=timeout)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=seconds)
    if backend == "gloo":
        dist.barrier()  # a rank that left before another one has connected would stop that one
    return fn(rank, world_size, *args, **kwargs)


def _leave_group() -> None:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
