"""Collectives of CPU memory on Gloo, made of messages between two ranks.

Note [Receives first]
~~~~~~~~~~~~~~~~~~~~~
Gloo sends when the other side has reported that it is ready to receive, and that report travels
behind whatever the other side is sending. Gloo's own all-to-all and all-gather post their receives
when they have their turn on the group, after those of the bucket before, and sometimes after their
sends. Then the ranks alternate::

    rank 0   ===== data ===== ready                      ===== data ===== ready
    rank 1                          ===== data ===== ready

and one direction of a full-duplex link is idle: over 1 Gbit/s eight of them, one after the other,
took 1.4 to 2 times as long as their bytes need. Here all receives are posted as soon as a
collective is issued, before its sends, and while those of other buckets are under way; the same
eight took 1.05 times as long.

Note [Nothing posted is dropped]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A buffer that is freed before its message arrives blocks the connection forever: Gloo neither reads
on nor sees the other side close, so nothing else that is pending there ever ends. If a collective
can be posted only in part, because a peer has left, the posted part must therefore end first.
Waiting for it might take forever. But a wait that times out closes all connections of the process
group, and everything that is pending there fails, here and on the peers.

Messages with one tag between two ranks arrive in the order in which they are sent, and all ranks
issue the collectives of a stage group in one order. So one tag suffices, except where parts are
forwarded later.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Work

from commhooks import native
from commhooks.errors import CommHookPeerError
from reducer.peers import abort_works

_IS_COMPILED = hasattr(native, "ring_gather")
_TAG = 0


class BrokenConnectionError(CommHookPeerError):
    """Gloo refuses to send, because a peer has closed its connection; the text is Gloo's."""


def is_possible(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Return whether these collectives work for ``tensor`` on ``group``: CPU memory on Gloo.

    They need the compiled extension. All ranks have it, or none: see ``handle.register``.
    """
    is_on_host = isinstance(group, ProcessGroupGloo) and tensor.device.type == "cpu"
    return is_on_host and _IS_COMPILED


def all_to_all(
    group: dist.ProcessGroup, sent: Tensor, received: Tensor, *, with_own: bool = True
) -> Work:
    """Send part i of ``sent`` to rank i, and receive parts from all ranks, by rank.

    ``with_own``: whether this rank's part is copied.
    """
    rank, size = group.rank(), group.size()
    # Starting with the next rank, so that not all ranks send to the same one first.
    peers = [(rank + distance) % size for distance in range(0 if with_own else 1, size)]
    outgoing, incoming = sent.chunk(size), received.chunk(size)
    return send_and_receive(
        group,
        [(peer, outgoing[peer]) for peer in peers],
        [(peer, incoming[peer]) for peer in peers],
    )


def all_gather(group: dist.ProcessGroup, tensor: Tensor, gathered: Tensor) -> Work:
    """Gather ``tensor`` of every rank into ``gathered``, by rank."""
    own = gathered[group.rank()]
    own.copy_(tensor)
    try:
        return native.ring_gather(group, gathered.unbind())
    except RuntimeError as error:
        broken = str(error)  # the error itself refers to this frame, which keeps the group
    raise BrokenConnectionError(broken)


def send_and_receive(
    group: dist.ProcessGroup,
    sent: Iterable[tuple[int, Tensor]],
    received: Iterable[tuple[int, Tensor]],
) -> Work:
    """Send tensors to some ranks and receive from some, possibly this one: Note [Receives first].

    Raises:
        BrokenConnectionError: A connection is known to be broken. Later failures show in the Work.
    """
    rank = group.rank()
    sent, received = list(sent), list(received)
    own = [[tensor for peer, tensor in messages if peer == rank] for messages in (sent, received)]
    for source, destination in zip(*own, strict=True):
        destination.copy_(source)
    works = []
    broken: Exception | None = None
    try:
        for peer, part in received:
            if peer != rank:
                works.append(group.recv([part], peer, _TAG))
        for peer, part in sent:
            if peer != rank:
                works.append(group.send([part], peer, _TAG))
    except Exception as error:
        broken = error.with_traceback(None)  # which would keep this frame, and so the group
    if broken is None:
        return native.join_works(works)
    abort_works(works)  # see Note [Nothing posted is dropped]
    raise BrokenConnectionError(str(broken)) if isinstance(broken, RuntimeError) else broken
