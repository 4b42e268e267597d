"""Ranks with a persistent Gloo process group, driven step by step from this process."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from commhooks.cluster.group import join_group, local_store
from commhooks.cluster.links import ShapedLink
from commhooks.cluster.pool import RankPool

__all__ = ["Ranks"]

_PORT = 29500  # in the namespace of host 0, where no other process listens
_REPORTING = 10.0  # seconds for ranks to report a collective that timed out: they know more


class Ranks:
    """A context manager of ``world_size`` ranks, over loopback or one on each host of ``link``.

    ``ranks(fn, ...)`` runs ``fn(rank, ...)`` on every rank. State between calls lives in the
    modules of the rank processes. Their output is shown only if a rank dies.

    Args:
        world_size: number of ranks.
        link: hosts to start the ranks on; None for loopback.
        threads: number of threads of each rank.
        timeout: of each collective, in seconds. A call ends 10 seconds after that, at the latest.
    """

    def __init__(
        self,
        world_size: int,
        link: ShapedLink | None = None,
        *,
        threads: int = 1,
        timeout: float = 600.0,
    ) -> None:
        self.world_size = world_size
        self._timeout = timeout
        self._link = link
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads)}
        if link is not None:
            environment["GLOO_SOCKET_IFNAME"] = link.interface
        self._pool = RankPool(link.prefixes if link else (), environment, keep_logs=True)
        self.restart()

    def restart(self) -> None:
        """Start the ranks as new processes, which have the state of no earlier call."""
        self._pool.close()
        try:
            if self._link is not None:
                # The parent is not in the namespaces of the hosts.
                self(_host_or_join, self.world_size, self._link.address, _PORT, self._timeout)
            else:
                self._store = local_store()
                self(join_group, self.world_size, "127.0.0.1", self._store.port, self._timeout)
        except BaseException:
            self.close()
            raise

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results by rank; raises the errors of :meth:`RankPool.run`.

        After an error the group cannot be used until :meth:`restart`.
        """
        timeout = self._timeout + _REPORTING
        return self._pool.run(fn, self.world_size, args, kwargs, timeout=timeout)

    def close(self) -> None:
        """End the processes."""
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


def _host_or_join(rank: int, *args: Any) -> None:
    join_group(rank, *args, hosts_store=rank == 0)
