"""Ranks with a Gloo process group that lasts, driven step by step from this process."""

from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from commhooks.cluster.call import Call
from commhooks.cluster.links import Link
from commhooks.cluster.pool import RankPool

__all__ = ["Ranks"]

_PORT = 29500  # in the namespace of host 0, where nobody else listens


class Ranks:
    """``world_size`` ranks over loopback, or one on each host of ``link``; a context manager.

    ``ranks(fn, ...)`` runs ``fn(rank, ...)`` on every rank. State between calls lives in the
    modules of the rank processes. What ranks print is shown only if one dies.

    Args:
        threads: of each rank.
        timeout: of a call, and of each collective in it, in seconds.
    """

    def __init__(
        self,
        world_size: int,
        link: Link | None = None,
        *,
        threads: int = 1,
        timeout: float = 600.0,
    ) -> None:
        self.world_size = world_size
        self._timeout = timeout
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads)}
        if link is not None:
            environment["GLOO_SOCKET_IFNAME"] = link.interface
        self._pool = RankPool(link.prefixes if link else (), environment, keep_logs=True)
        try:
            if link is not None:
                self(_join, world_size, link.address, _PORT, timeout, True)
            else:
                self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                self(_join, world_size, "127.0.0.1", self._store.port, timeout, False)
        except BaseException:
            self.close()
            raise

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Results in order of ranks; errors as of :meth:`RankPool.run`.

        After an error the group is of no more use.
        """
        calls = [Call(fn, (rank, *args), kwargs, self._timeout) for rank in range(self.world_size)]
        return self._pool.run(calls, self._timeout)

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _join(
    rank: int, world_size: int, address: str, port: int, timeout: float, rank_0_hosts: bool
) -> None:
    seconds = timedelta(seconds=timeout)
    hosts = rank_0_hosts and rank == 0
    store = TCPStore(address, port, is_master=hosts, timeout=seconds, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=seconds)
