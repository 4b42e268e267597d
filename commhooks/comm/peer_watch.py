"""Notices that a peer has gone, also while a message is on its way.

Note [Messages that never end]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When a connection of Gloo closes, whatever waits for it fails at once, except for a message that is
on its way at that moment: nothing reports that it has ended, so its Work completes only with the
timeout (torch 2.13). A small message is on its way for no time, but one of megabytes over a slow
link is for most of a step.

Therefore, before ranks communicate for the first time, each connects to its neighbors in the ring
of these ranks by two more process groups, and posts a receive on each that is never satisfied::

    rank 0 ── rank 1 ── rank 2 ── rank 3 ── rank 0

Such a receive is not on its way, so it fails as soon as the neighbor is gone. The neighbor closes
these connections as well when it fails, so all ranks of the ring get to know. It costs a thread for
each connection, which sleeps.

A rank whose neighbor is gone in the middle of a step waits a few seconds for what is on its way,
because most of it fails or completes by itself; longer in an exchange, whose data the neighbor may
have sent before it left. Then it closes its connections, and what still has not ended never
will: nothing can write to its memory any more. Its Works, and the tensors that they refer to, live
on in the thread that waits for them. The same happens if the rank fails first for another reason,
such as another collective with that neighbor: the stage groups of what is on its way are kept, and
closed in the same way.

The reducer's own averages are not watched: all 17 that lost a peer in the middle of 256 MB raised
within 4 s.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commhooks.comm.threads import start_thread
from reducer.peers import close_connections

_TAG = 0
_FOREVER = timedelta(days=10_000)


class PeerWatch:
    """Calls ``on_loss`` on a thread of its own when a neighbor has gone, or after :meth:`close`.

    Args:
        pairs: Process groups of two ranks, this one and a neighbor.
        on_loss: What to call, once.
    """

    def __init__(self, pairs: Sequence[Any], on_loss: Callable[[], None]) -> None:
        self._pairs = list(pairs)
        self._on_loss: Callable[[], None] | None = on_loss
        self._lock = threading.Lock()
        works = [
            pair.recv([torch.empty(1, device="cpu")], 1 - pair.rank(), _TAG) for pair in self._pairs
        ]
        for work in works:
            start_thread("commhooks-watch", self._wait, work)

    def close(self) -> None:
        """Close the connections, which the neighbors see."""
        for pair in self._pairs:
            close_connections(pair)
        self._pairs.clear()

    def _wait(self, work: Work) -> None:
        with suppress(RuntimeError):
            work.wait(_FOREVER)
        with self._lock:
            on_loss, self._on_loss = self._on_loss, None
        if on_loss is not None:
            on_loss()


def ring_pairs(rank: int, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of neighbors in the ring of ``ranks`` that ``rank`` is in.

    All ranks connect to their neighbors in an order in which no rank waits for more than two others
    that wait themselves.
    """
    size, own = len(ranks), ranks.index(rank)
    steps = [(i, (i + 1) % size) for i in range(size if size > 2 else size - 1)]
    order = sorted(steps, key=lambda pair: (pair[0] % 2, pair[0] == size - 1, pair[0]))
    return [(min(ranks[a], ranks[b]), max(ranks[a], ranks[b])) for a, b in order if own in (a, b)]
