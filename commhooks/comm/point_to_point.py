"""Collectives of CPU memory on Gloo, out of messages between two ranks.

Note [Receives first]
~~~~~~~~~~~~~~~~~~~~~
Gloo sends once the other side has said that it is ready to receive, and that word travels behind
whatever the other side is sending itself. Gloo's own all-to-all and all-gather post their receives
when their turn has come on the group, after those of the bucket before, and sometimes after their
sends. Then ranks take turns::

    rank 0   ===== data ===== ready                      ===== data ===== ready
    rank 1                          ===== data ===== ready

and of a link that carries both directions at once, one direction idles: over 1 Gbit/s eight of
them, one after the other, took 1.4 to 2 times as long as their bytes. Here all receives are posted
as soon as a collective is issued, before what it sends, and with those of other buckets on their
way; the same eight took 1.05 times as long. (bench/test_links.py measures hooks on such links.)

Note [Nothing posted is dropped]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A buffer that is gone when its message comes blocks the connection for ever: Gloo neither reads on
nor sees the other side close, so nothing else that is pending there ever ends. If a collective can
be posted only in part, because a peer has gone, what was posted must therefore end first. Waiting
for it might take for ever; a wait that times out closes all connections of the channel, and all
that is pending there fails, here and on the peers.

Messages of one tag between two ranks arrive in the order in which they are sent, and a channel's
collectives are issued in one order: one tag will do, except where parts are passed on later.
"""

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Work

from commhooks._C import join_works, ring_gather
from commhooks.errors import CommHookPeerError

__all__ = ["all_gather", "all_to_all", "is_possible", "send_and_receive"]

_TAG = 0
_AT_ONCE = timedelta(milliseconds=1)


def is_possible(channel: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Whether this is for ``tensor`` on ``channel``; other backends have collectives to use."""
    return isinstance(channel, ProcessGroupGloo) and tensor.device.type == "cpu"


def all_to_all(channel: dist.ProcessGroup, sent: Tensor, received: Tensor) -> Work:
    """Part i of ``sent`` goes to rank i; parts from all ranks come into ``received``, by rank."""
    rank, size = channel.rank(), channel.size()
    # From the next rank on: not all ranks begin with the same one.
    peers = [(rank + distance) % size for distance in range(size)]
    outgoing, incoming = sent.chunk(size), received.chunk(size)
    return send_and_receive(
        channel,
        [(peer, outgoing[peer]) for peer in peers],
        [(peer, incoming[peer]) for peer in peers],
    )


def all_gather(channel: dist.ProcessGroup, tensor: Tensor, gathered: Tensor) -> Work:
    """``tensor`` of every rank comes into ``gathered``, by rank."""
    own = gathered[channel.rank()]
    own.copy_(tensor)
    try:
        return ring_gather(channel, gathered.unbind())
    except RuntimeError as error:
        broken = str(error)  # the error itself would lead to this frame, and keep the channel
    raise CommHookPeerError(broken)


def send_and_receive(
    channel: dist.ProcessGroup,
    sent: Iterable[tuple[int, Tensor]],
    received: Iterable[tuple[int, Tensor]],
) -> Work:
    """Tensors to some ranks and from some, this one included; see Note [Receives first].

    Raises CommHookPeerError if a connection is known to be broken; others show in the Work.
    """
    rank = channel.rank()
    works = []
    kept: list[Tensor] = []
    broken = ""
    try:
        for source, tensor in received:
            if source == rank:
                kept.append(tensor)
            else:
                works.append(channel.recv([tensor], source, _TAG))
        for target, tensor in sent:
            if target == rank:
                kept.pop().copy_(tensor)
            else:
                works.append(channel.send([tensor], target, _TAG))
    except RuntimeError as error:
        broken = str(error)  # the error itself would lead to this frame, and keep the channel
    if broken:
        _end(works)
        raise CommHookPeerError(broken)
    return join_works(works)


def _end(works: Iterable[Work]) -> None:
    """See Note [Nothing posted is dropped]."""
    for work in works:
        with suppress(RuntimeError):
            work.wait(_AT_ONCE)
