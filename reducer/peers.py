"""Raise one error when a peer is lost, whatever the backend raises.

Note [Lost peers]
~~~~~~~~~~~~~~~~~
A peer that died, left or does not answer shows in the next collective with it, and each backend
says so in its own way: Gloo raises a RuntimeError that names a connection or a time-out, NCCL
DistBackendError, a store DistNetworkError. Therefore every collective runs inside
:func:`collective`, those of the engine inside ``with_peers`` (csrc/reducer/peers.h), and both leave
it to :func:`peer_error` what users get. What it returns is always a RuntimeError, as before.

The error names the lost ranks. A rank that gets here

    1. leaves a note in the store, which shows that it is alive, with its suspects: the ranks whose
       connections were closed, or all others if that is unknown. Its first note stays: later, all
       connections are closed;
    2. closes its connections of the group, on Gloo. What its peers have pending with it then fails
       at once instead of after the time-out, so one after the other gets here;
    3. waits a moment for notes of its suspects. A suspect without a note is lost. One with a note
       closed its connections because of its own suspects, which join those of this rank.

The group cannot be used any more, but with a rank missing it could not be used anyway.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, _broadcast_coalesced

from reducer.errors import CommHookError, CommHookPeerError

T = TypeVar("T")

# In the texts of Gloo, of stores, of collectives under TORCH_DISTRIBUTED_DEBUG=DETAIL, of MPI, UCC,
# and "nccl2".
_SIGNS = re.compile(
    "/gloo/|[Tt]imed out|(Application|[Cc]onnect|[Ww]ait|Read|Write|Socket) [Tt]imeout|"
    "Connection (closed|reset|refused)|peer closed|monitoredBarrier|"
    "NCCL (Async Error|communicator was aborted)"
)
# NCCL reports mistakes of the caller and failures of this rank's device as DistBackendError, too.
_OWN = re.compile(
    r"invalid usage|invalid argument|Duplicate GPU|unhandled cuda error|out of memory|CUDA failure"
)
_GRACE_SECONDS = 2.0  # for the notes of others
_STORE_SECONDS = 4.0  # for the answers of the store
_AT_ONCE = timedelta(milliseconds=1)
_NO_LIMIT = timedelta(0)  # the default of C++
_TAG = 0x70656572  # of messages that are never sent
BROADCAST_BYTES = 250 * 2**20
"""The size up to which tensors are broadcast together."""


@contextmanager
def collective(
    group: dist.ProcessGroup, what: str, late: Callable[[], list[int]] = list
) -> Iterator[None]:
    """Raise CommHookPeerError if the collectives of ``group`` in the block lose a peer.

    ``what`` is under way in the block: "the broadcast of buffers". ``late`` returns the ranks that
    have not begun it; the error names them if all ranks are alive.
    """
    try:
        yield
    except RuntimeError as error:
        meant = peer_error(group, what, error, late)
        if meant is error:
            raise
        raise meant from error


def wait(work: dist.Work | None) -> None:
    """Wait for a collective. A Work that is written in Python has no default for the time-out."""
    assert work is not None  # for ranks outside the group
    work.wait(_NO_LIMIT)


def broadcast(group: dist.ProcessGroup, tensors: Iterable[Tensor], root: int) -> None:
    """Overwrite tensors with those of the group's rank ``root``. Collective."""
    tensors = [tensor.detach() for tensor in tensors]
    if tensors and group.size() > 1:
        with collective(group, f"the broadcast of {len(tensors)} tensors of rank {root}"):
            _broadcast_coalesced(group, tensors, BROADCAST_BYTES, root)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether a collective raised ``error`` because a peer is lost."""
    text = str(error)
    is_sign = isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and _SIGNS.search(text) is not None
    )
    return is_sign and not _OWN.search(text)


def peer_error(
    group: dist.ProcessGroup,
    what: str,
    error: BaseException,
    late: Callable[[], list[int]] = list,
) -> BaseException:
    """Return the CommHookPeerError for ``error``, or ``error`` if it has another reason.

    See Note [Lost peers]. Blocks for a moment. ``late``: see :func:`collective`.
    """
    if isinstance(error, CommHookError) or not is_peer_loss(error):
        return error
    lost = _lost_ranks(group)
    if not lost:
        with suppress(RuntimeError):
            lost = call_within(_STORE_SECONDS, late)
    meant = CommHookPeerError(describe_loss(group, f"[rank {group.rank()}] {what}", error, lost))
    meant.__cause__ = error
    return meant


def describe_loss(
    group: dist.ProcessGroup, what: str, error: BaseException, lost: list[int] | None = None
) -> str:
    """Return the message for the loss of the ranks ``lost`` during ``what``."""
    ranks = ", ".join(map(str, lost or ()))
    who = f"rank{'s' if len(lost) > 1 else ''} {ranks}" if lost else "a peer"
    reason = re.sub(r"^\[\S*\] ", "", str(error)).partition(". This is typically")[0]
    return (
        f"{what} failed: {who} failed, left or did not answer, or the network failed ({reason}; "
        f"time-out of the process group: {_timeout(group)}). The output of the lost rank tells "
        "why. Restart all ranks from a checkpoint"
    )


def _timeout(group: dist.ProcessGroup) -> str:
    with suppress(RuntimeError, AttributeError):
        for device in group._device_types:  # noqa: SLF001
            timeout: timedelta = group._get_backend(device).options._timeout  # noqa: SLF001
            return f"{timeout.total_seconds():g} s"
    return "unknown"


def _lost_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks that do not answer, as far as that can be found out; see the note."""
    if (group_store := group.get_group_store()) is None:
        return []
    store = PrefixStore("commhooks/lost peers", group_store)
    receives = _receives(gloo_of(group))
    others = [r for r in range(group.size()) if r != group.rank()]
    suspects = [r for r in others if r not in receives] or others
    # The store may be gone with its rank, and does not answer if that rank has been stopped.
    with suppress(RuntimeError):
        # The suspects in the first note of this rank; it has closed its connections since.
        note = json.dumps(suspects)
        first = call_within(
            _STORE_SECONDS, lambda: store.compare_set(f"rank {group.rank()}", "", note)
        )
        suspects = json.loads(first)
    abort_works(receives.values())
    with suppress(RuntimeError):
        return call_within(_STORE_SECONDS, lambda: _without_note(store, suspects))
    return []


def _without_note(store: Store, suspects: list[int]) -> list[int]:
    deadline = time.monotonic() + _GRACE_SECONDS
    missing, alive = set(suspects), set[int]()
    while True:
        for rank in sorted(missing):
            if store.check([f"rank {rank}"]):
                alive.add(rank)
                missing.update(json.loads(store.get(f"rank {rank}")))
        missing -= alive
        if not missing or time.monotonic() > deadline:
            return sorted(missing)
        time.sleep(0.01)


def close_connections(backend: Any) -> None:
    """Close all connections of a ``ProcessGroupGloo``.

    What is pending on it fails, here and on the peers, except for messages that are on their way.
    """
    abort_works(_receives(backend).values())


def gloo_of(group: dist.ProcessGroup) -> Any:
    """Return the Gloo backend of ``group`` for the CPU; None if there is none."""
    with suppress(RuntimeError):
        backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001
        if isinstance(backend, ProcessGroupGloo):
            return backend
    return None


def _receives(gloo: Any) -> dict[int, dist.Work]:
    """Return a pending receive from each rank whose connection is open; without Gloo, none."""
    receives = {}
    for rank in range(gloo.size() if gloo else 0):
        if rank != gloo.rank():
            with suppress(RuntimeError):
                receives[rank] = gloo.recv([torch.empty(1, device="cpu")], rank, _TAG)
    return receives


def abort_works(works: Iterable[dist.Work]) -> None:
    """Abort messages on Gloo: unless they have ended, all connections are closed."""
    for work in works:
        with suppress(RuntimeError):
            work.wait(_AT_ONCE)  # a wait that times out closes all connections


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of ``call``; raise RuntimeError if it fails or does not return in time."""
    results: list[T] = []
    errors: list[str] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(str(error))  # the error itself refers to frames, which may keep groups

    thread = threading.Thread(target=run, name="commhooks-limited", daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results.pop()
    raise RuntimeError(errors[0] if errors else f"timed out after {seconds:g} s")
