"""The communicator of a hook: awaitable collectives whose bytes are counted."""

import functools
import hashlib
import warnings
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceScatterOptions,
    Work,
)

from commhooks.comm import point_to_point, wire
from commhooks.comm.exchange import Exchange
from commhooks.errors import CommHookError
from commhooks.precision import at_least_float32
from reducer.peers import wait


def _reducing(operation: ReduceOp.RedOpType) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(operation)
    return options


_ALL_REDUCE = {
    "sum": _reducing(ReduceOp.SUM),
    "min": _reducing(ReduceOp.MIN),
    "max": _reducing(ReduceOp.MAX),
    "product": _reducing(ReduceOp.PRODUCT),
}


@dataclass(slots=True, eq=False, weakref_slot=True)
class PendingCollective:
    """One collective that a hook awaits. The runner of the hook issues it when it has its turn.

    ``start`` issues it on a process group; once the work has completed, ``result`` is valid.
    ``count`` returns the bytes on the wire; called when nothing waits for it. ``members``: the
    ranks of the model's group that take part, all if empty: Note [Subgroups] in stage_groups.py.
    ``parallel``: see :meth:`Communicator.among`. ``is_vote``: issued after all buckets have
    finished, see Note [All ranks or none]. A collective that is dropped before it ``is_awaited``
    warns. ``issued_ns``: when it was issued, in nanoseconds of ``time.monotonic_ns()``, 0 before
    that and for those that are never issued.
    """

    operation: str
    start: Callable[[dist.ProcessGroup], Work]
    result: Tensor | None
    count: Callable[[], int]
    members: tuple[int, ...] = ()
    parallel: int = 1
    is_vote: bool = False
    is_awaited: bool = False
    issued_ns: int = 0

    def run(self, group: dist.ProcessGroup) -> None:
        """Issue it, and let the current stream wait for it, on the CPU the host."""
        # Not on the current stream itself (asyncOp=False): then NCCL returns no work, which is what
        # waits under TORCH_NCCL_BLOCKING_WAIT, and process groups in Python crash on it.
        wait(self.start(group))

    def __await__(self) -> Generator["PendingCollective", None, Tensor]:
        if self.is_awaited:
            raise CommHookError(f"comm.{self.operation}() was awaited twice; keep its result")
        self.is_awaited = True
        yield self
        assert self.result is not None
        return self.result

    def __del__(self) -> None:
        if not self.is_awaited:
            warnings.warn(
                f"a hook called comm.{self.operation}() without `await`, so nothing was sent",
                RuntimeWarning,
                stacklevel=2,
            )


class Communicator:
    """The ranks that train together, as the hook of one bucket sees them.

    Every method returns an awaitable at once. Within a bucket, all ranks must await the same
    collectives, of the same sizes, in the same order. Buckets are independent of each other: see
    Note [Order of collectives] in issue_order.py. Tensors must be contiguous and on the bucket's
    device, and must not be accessed until the ``await`` is over. On CUDA an await orders streams
    only, and does not wait for the device. With one rank nothing is sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        step: int,
        key: str,
        seed: int = 0,
        ranks: tuple[int, ...] = (),
        parallel: int = 1,
    ) -> None:
        self.group = group
        """The model's process group."""
        self.rank = ranks.index(group.rank()) if ranks else group.rank()
        self.ranks = ranks or tuple(range(group.size()))
        """Its ranks, by their numbers in the model's process group."""
        self.size = len(self.ranks)
        self.step = step
        """The number of synchronized backward passes before this one, also after a resume."""
        self.wire_bytes = 0
        """The bytes that this rank has sent for this bucket: :mod:`commhooks.comm.wire`.

        Communicators derived from the one that ``reduce`` gets do not count.
        """
        self.wants_contribution = False
        """Whether the hook around this one needs :attr:`contribution`."""
        self.contribution: Tensor | None = None
        """The part of this rank's gradients that is in the average, flat.

        The rest is this rank's error. A lossy hook sets it before it returns, if it is wanted.
        """
        self.begun: list[Exchange] = []
        """The exchanges that the hook has begun on this bucket, nested hooks included."""
        self.collectives: weakref.WeakSet[PendingCollective] = weakref.WeakSet()
        """Those that the hook still holds, nested hooks included."""
        self.launched: int | torch.Event = 0
        """Time at which the bucket was handed over: on the CPU in nanoseconds of
        ``time.monotonic_ns()``, on a device an event on the stream of backward; with times
        unless a CUDA graph may capture the hook."""
        self._key = key
        self._seed = seed
        self._ranks = ranks
        self._parallel = parallel

    def within(
        self, hook: object, *, key: str | None = None, wants_contribution: bool = False
    ) -> "Communicator":
        """Return a communicator for a hook nested in the present one, with that hook's seed.

        Args:
            hook: The nested hook.
            key: The key of the bucket that it gets, by default the present one.
            wants_contribution: Whether the nested hook is to set the ``contribution`` of the
                returned communicator.
        """
        nested = self._derived(key=self._key if key is None else key, seed=getattr(hook, "seed", 0))
        nested.wants_contribution = wants_contribution
        return nested

    def contribute(self, share: Tensor) -> None:
        """Note that the average is the sum over all ranks of ``share``, which is flat.

        If it is wanted, set :attr:`contribution` to a new tensor, ``size`` times ``share``.
        """
        if self.wants_contribution:
            exact = at_least_float32(share.dtype)
            self.contribution = share.to(exact, copy=True).mul_(self.size)

    @cached_property
    def generator(self) -> torch.Generator:
        """The same random numbers on all ranks, different in each step and bucket; on the CPU."""
        text = f"{self._seed}:{self.step}:{self._key}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> PendingCollective:
        """Reduce ``tensor`` over all ranks in place, by sum, min, max or product, and return it."""
        options = _ALL_REDUCE.get(op)
        if options is None:
            raise CommHookError(f"all_reduce: expected op in {sorted(_ALL_REDUCE)}, found {op!r}")
        _check_contiguous("all_reduce", tensor)
        return self._pending(
            "all_reduce",
            lambda group: group.allreduce([tensor], options),
            tensor,
            lambda: wire.all_reduce_bytes(tensor.nbytes, self.size),
        )

    def all_gather(self, tensor: Tensor) -> PendingCollective:
        """Return the tensors of all ranks, by rank: ``(size, *tensor.shape)``."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if self.size == 1:
            gathered.copy_(tensor)

        def start(group: dist.ProcessGroup) -> Work:
            if point_to_point.is_possible(group, tensor):
                return point_to_point.all_gather(group, tensor, gathered)
            return group._allgather_base(gathered.view(-1), tensor.reshape(-1))  # noqa: SLF001

        return self._pending(
            "all_gather",
            start,
            gathered,
            lambda: wire.all_gather_bytes(tensor.nbytes, self.size),
        )

    def all_to_all(self, tensor: Tensor, *, with_own: bool = True) -> PendingCollective:
        """Send part i along dimension 0 to rank i. Return the received parts, by rank.

        The length of dimension 0 is a multiple of ``size``, and the result has the same shape.

        ``with_own``: without it, this rank's part of the result may be anything, which saves a
        copy.
        """
        self._check_parts("all_to_all", tensor)
        received = tensor.clone() if self.size == 1 else torch.empty_like(tensor)

        def start(group: dist.ProcessGroup) -> Work:
            if point_to_point.is_possible(group, tensor):
                return point_to_point.all_to_all(group, tensor, received, with_own=with_own)
            return group.alltoall_base(received, tensor, [], [])

        return self._pending(
            "all_to_all",
            start,
            received,
            lambda: wire.all_to_all_bytes(tensor.nbytes, self.size),
        )

    def reduce_scatter(self, tensor: Tensor) -> PendingCollective:
        """Return the sum over all ranks of this rank's part along dimension 0.

        The length of dimension 0 is a multiple of ``size``.
        """
        self._check_parts("reduce_scatter", tensor)
        part = tensor.chunk(self.size)[self.rank]
        part = part.clone() if self.size == 1 else torch.empty_like(part)
        options = ReduceScatterOptions()
        return self._pending(
            "reduce_scatter",
            lambda group: group._reduce_scatter_base(part, tensor, options),  # noqa: SLF001
            part,
            lambda: wire.reduce_scatter_bytes(tensor.nbytes, self.size),
        )

    def broadcast(self, tensor: Tensor, root: int = 0) -> PendingCollective:
        """Overwrite ``tensor`` with that of rank ``root`` of the group, and return it."""
        self._check_rank("broadcast", "root", root)
        _check_contiguous("broadcast", tensor)
        options = BroadcastOptions()
        options.rootRank = root
        return self._pending(
            "broadcast",
            lambda group: group.broadcast([tensor], options),
            tensor,
            lambda: wire.broadcast_bytes(tensor.nbytes, self.size, is_root=self.rank == root),
        )

    def sendrecv(self, tensor: Tensor, send_to: int, receive_from: int) -> PendingCollective:
        """Send ``tensor`` to one rank of the group. Return that of another one, of equal shape.

        All ranks take part: each receives from the rank that sends to it, which may be itself. On
        Gloo and NCCL each rank sends one message, whatever the size of the group.
        """
        collective = self._push("sendrecv", tensor, send_to, [receive_from])
        assert collective.result is not None
        collective.result = collective.result[0]
        return collective

    def push(self, tensor: Tensor, send_to: int, receive_from: Sequence[int]) -> PendingCollective:
        """Send ``tensor`` to one rank. Return those of ``receive_from``: ``(k, *tensor.shape)``.

        Like :meth:`sendrecv`, but a rank may receive any number of messages, including none. All
        ranks take part. ``receive_from`` must be exactly the ranks that send to this one, in
        ascending order.
        """
        return self._push("push", tensor, send_to, receive_from)

    def among(self, ranks: Sequence[int], *, parallel: int = 1) -> "Communicator":
        """Return a communicator among some of these ranks. Sends nothing.

        Its rank i is ``ranks[i]``. Only the ranks in ``ranks`` may call this, all with the same
        ``ranks``. Other ranks may await more or fewer collectives, but in each step in which these
        ranks communicate, the others must await at least one collective. The bytes count for the
        present bucket as well. ``parallel``: how many such groups of the same nodes communicate at
        the same time, which predictions need to know.

        Raises:
            CommHookError: ``ranks`` are not ascending, or this rank is not among them.
        """
        if list(ranks) != sorted(set(ranks)) or self.rank not in ranks:
            raise CommHookError(
                f"among: expected ranks in ascending order, {self.rank} among them, found "
                f"{list(ranks)}"
            )
        for rank in ranks:
            self._check_rank("among", "each of them", rank)
        own = self._ranks or range(self.size)
        chosen = () if len(ranks) == self.group.size() else tuple(own[rank] for rank in ranks)
        return self._derived(ranks=chosen, parallel=parallel)

    def begin(self, exchange: Callable[["Communicator"], Coroutine[Any, Any, Tensor]]) -> Exchange:
        """Begin an exchange when this step has succeeded; a later step awaits its result.

        ``exchange(comm)`` is a coroutine like ``reduce``, which gets a communicator among the same
        ranks. All ranks must begin the same exchanges in the same buckets, and await each of them
        in the same step. Training goes on in the meantime, with other steps of the same hook, on
        another thread: the exchange must not use what they change, and its collectives must be its
        own. See Note [Exchanges between steps] in exchange.py.
        """
        comm = self._derived()
        comm.begun = []
        begun = Exchange(functools.partial(exchange, comm))
        self.begun.append(begun)
        return begun

    def _derived(self, **changes: Any) -> "Communicator":
        """Return a communicator of the same run of the hook, with other arguments."""
        own: dict[str, Any] = {"key": self._key, "seed": self._seed}
        own |= {"ranks": self._ranks, "parallel": self._parallel}
        derived = Communicator(self.group, step=self.step, **own | changes)
        derived.begun = self.begun
        derived.collectives = self.collectives
        derived.launched = self.launched
        return derived

    def _pending(
        self,
        operation: str,
        start: Callable[[dist.ProcessGroup], Work],
        result: Tensor,
        count: Callable[[], int],
    ) -> PendingCollective:
        args = operation, start, result, count, self._ranks, self._parallel
        self.collectives.add(pending := PendingCollective(*args))
        return pending

    def _push(
        self, operation: str, tensor: Tensor, send_to: int, receive_from: Sequence[int]
    ) -> PendingCollective:
        _check_contiguous(operation, tensor)
        self._check_rank(operation, "send_to", send_to)
        for source in receive_from:
            self._check_rank(operation, "receive_from", source)
        if list(receive_from) != sorted(set(receive_from)):
            raise CommHookError(
                f"{operation}: expected receive_from in ascending order, found {list(receive_from)}"
            )
        if (send_to == self.rank) != (self.rank in receive_from):
            raise CommHookError(
                f"{operation}: a rank that sends to itself also receives from itself; expected "
                f"rank {self.rank} as send_to and in receive_from, or in neither, found send_to "
                f"{send_to} and receive_from {list(receive_from)}"
            )
        received = tensor.new_empty((len(receive_from), *tensor.shape))
        if self.size == 1:
            received.copy_(tensor)

        def start(group: dist.ProcessGroup) -> Work:
            if point_to_point.is_possible(group, tensor):
                sources = zip(receive_from, received.unbind(), strict=True)
                return point_to_point.send_and_receive(group, [(send_to, tensor)], sources)
            return _send_to_all(group, tensor, send_to, received, receive_from)

        return self._pending(
            operation, start, received, lambda: 0 if send_to == self.rank else tensor.nbytes
        )

    def _check_parts(self, operation: str, tensor: Tensor) -> None:
        _check_contiguous(operation, tensor)
        if tensor.dim() == 0 or tensor.shape[0] % self.size != 0:
            raise CommHookError(
                f"{operation}: expected dimension 0 to be a multiple of the {self.size} ranks, "
                f"found shape {tuple(tensor.shape)}; pad the tensor first"
            )

    def _check_rank(self, operation: str, argument: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise CommHookError(
                f"{operation}: expected {argument} to be a rank of the group, 0 to "
                f"{self.size - 1}, found {rank}"
            )


def _send_to_all(
    group: dist.ProcessGroup,
    tensor: Tensor,
    send_to: int,
    received: Tensor,
    receive_from: Sequence[int],
) -> Work:
    """Send by an all-to-all whose other parts are empty. NCCL skips these and groups the rest."""
    sent_sizes, received_sizes = ([0] * group.size() for _ in range(2))
    sent_sizes[send_to] = tensor.numel()
    for source in receive_from:
        received_sizes[source] = tensor.numel()
    return group.alltoall_base(received.view(-1), tensor.view(-1), received_sizes, sent_sizes)


def _check_contiguous(operation: str, tensor: Tensor) -> None:
    """Raise CommHookError unless ``tensor`` is contiguous: Gloo would send the wrong memory."""
    if not tensor.is_contiguous():
        raise CommHookError(
            f"{operation}: expected a contiguous tensor, found shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}; call .contiguous() first"
        )
