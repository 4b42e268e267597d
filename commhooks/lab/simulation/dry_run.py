"""Run a hook alone, on real gradients, to see what it awaits and how long it works in between.

The hook is its own model, so that hooks of other packages can be simulated as well, without any
line about them here. The design note docs/design/2026-11-21-simulation.md compares this with meta
tensors and with a table of costs.

Note [Fake groups]
~~~~~~~~~~~~~~~~~~
A hook runs in a fake process group of any size, in one process: all its ranks hold the same
tensors, and only rank 0 exists. What a collective returns to rank 0 follows from what rank 0 passes
in, so a hook can run to its end among N ranks, and its decoders receive messages that they
understand. Nothing is sent. Rank 0 does at least as much as any other rank: in every topology of
:mod:`commhooks.algorithms` the first rank of a node leads it, or all of its ranks do the same.
"""

import gc
import math
import os
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ReduceOp

from commhooks.cluster import CPU, Device
from commhooks.comm.communicator import Communicator
from commhooks.comm.exchange import Exchange, completed
from commhooks.comm.wire import all_reduce_bytes
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace, merged_work
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, ModelInfo, Role, prepare_all
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.registry import create
from commhooks.hook.spec import HookSpec
from commhooks.kernels import BACKENDS, require
from reducer import GradBucket

_FEWEST, _MOST, _SECONDS = 2, 3, 2.0
"""Timed runs; no more than the fewest after the seconds. Another one warms up before: it allocates
memory and makes the hook's state."""
_LONGEST_EXCHANGE = 1000
"""Steps after which a dry run no longer waits for a hook to take the result of an exchange."""
_EVICTING_ELEMENTS = 1 << 24  # 64 MiB
"""In training, other buckets and backward use the caches before a hook sees its bucket again."""
_WINDOW, _MOST_KINDS = 1000, 8  # steps, and kinds of steps among them
_LATE, _PERIODS = 100_000, 240  # steps after all warm-ups; a multiple of usual periods


@dataclass(frozen=True)
class DryRunner:
    """Runs a hook alone on the ``buckets`` of one step, in order; their gradients do not change.

    The hook may write to ``parameters``, which are given by name, as are their ``roles``. Typical
    steps are those from ``first_step`` on. On a ``device``, seconds are those of the host or of the
    device, whichever takes longer; None stands for zeros.

    Its methods raise CommHookError if the hook does not work with this model or with so many ranks.
    """

    config: Mapping[str, Any]
    buckets: Sequence[GradBucket]
    parameters: Mapping[str, Tensor]
    roles: Mapping[str, Role] | None = None
    ranks_per_node: int = 1
    first_step: int = 1000
    device: Device | None = CPU

    @contextmanager
    def _hook(self, size: int) -> Iterator[CommHook]:
        """Make the hook in a fake group of ``size`` ranks."""
        with as_launched(self.ranks_per_node), torch.no_grad():
            hook = create(self.config)
            prepare_all(hook, self.parameters, fake_group(size), ModelInfo(self.roles))
            yield hook

    def trace(self, size: int) -> list[tuple[float, StepTrace]]:
        """Trace the hook once for each kind of step, with the share of such steps.

        Seconds are the shortest of a few runs; those of forward and backward are zeros. Raises
        CommHookError also if the hook fails in a fake group.
        """
        buckets = self.buckets
        with self._hook(size) as hook:
            tracer = _Tracer(hook, size, self.ranks_per_node, self.device)
            kinds = _typical_steps(hook, buckets, size, self.first_step)
            end = time.monotonic() + _SECONDS
            for step in kinds:
                tracer.step(buckets, step)  # warms up
            delays = {step: tracer.delay(buckets, step) for step in kinds}
            shares = dict(kinds)
            for step, delay in delays.items():
                if delay == 0:
                    continue
                # A step that takes the result of an exchange and sends nothing seems to be quiet.
                arrival = _sent_bytes(hook, buckets, size, step + delay)
                alike = (k for k in kinds if _sent_bytes(hook, buckets, size, k) == arrival)
                like = next(alike, step)
                if like != step and shares[like] > kinds[step]:
                    shares[like] -= kinds[step]
                    shares[step + delay] = kinds[step]
            runs: list[dict[int, list[BucketTrace]]] = []
            fewest, most = (_FEWEST, _MOST) if self.device else (1, 1)
            while len(runs) < fewest or (len(runs) < most and time.monotonic() < end):
                runs.append({step: tracer.step(buckets, step) for step in sorted(shares)})
        del hook, tracer
        gc.collect()  # its state may be as large as the model, and other sizes follow
        found = []
        for step, share in shares.items():
            delay = delays.get(step, 0)
            traces = []
            for of_bucket in zip(*(run[step] for run in runs), strict=True):
                # What a hook sends may depend on its state, which the last run has.
                is_alike = len({trace.structure for trace in of_bucket}) == 1
                fastest = merged_work(of_bucket[::-1], min) if is_alike else of_bucket[-1]
                exchanges = tuple(replace(each, steps=delay) for each in fastest.exchanges)
                traces.append(replace(fastest, exchanges=exchanges))
            found.append((share, StepTrace(tuple(traces), 0.0, is_native=False)))
        return found

    def stated_bytes(self, size: int) -> float | None:
        """Return the mean bytes per step by the cost formula of the hook; None if it has none."""
        with self._hook(size) as hook:
            kinds = _typical_steps(hook, self.buckets, size, self.first_step)
            sent = [(p, _sent_bytes(hook, self.buckets, size, step)) for step, p in kinds.items()]
        known = [(share, n) for share, of_step in sent for n in of_step if n is not None]
        if len(known) < len(sent) * len(self.buckets):
            return None
        return math.fsum(share * n for share, n in known)


class _Tracer:
    """Runs a hook in a fake group, and its exchanges as soon as it has handed them over."""

    def __init__(
        self, hook: CommHook, size: int, ranks_per_node: int, device: Device | None
    ) -> None:
        self._awaited: set[Exchange] = set()
        self._begun: list[Exchange] = []
        self._hook = hook
        self._size = size
        self._ranks_per_node = ranks_per_node
        self._clock = device.now if device else lambda: 0.0
        scratch = torch.zeros(_EVICTING_ELEMENTS if device else 0)
        self._scratch = device.put(scratch) if device else scratch

    def step(self, buckets: Sequence[GradBucket], step: int) -> list[BucketTrace]:
        """Trace the hook on copies of the buckets."""
        copies = (bucket_with(b, b.buffer().clone(), step=step) for b in buckets)
        return [self._trace(bucket) for bucket in copies]

    def delay(self, buckets: Sequence[GradBucket], step: int) -> int:
        """Return the number of steps after which an exchange that ``step`` begins is awaited.

        Runs these steps as well. 0 if the step begins none.
        """
        self._begun.clear()
        self.step(buckets, step)
        begun = set(self._begun)
        if not begun:
            return 0
        self._awaited.clear()
        for later in range(1, _LONGEST_EXCHANGE):
            self.step(buckets, step + later)
            if begun & self._awaited:
                return later
        return _LONGEST_EXCHANGE

    def _trace(self, bucket: GradBucket) -> BucketTrace:
        comm = Communicator(
            fake_group(self._size),
            step=bucket.step,
            key=bucket.key,
            seed=getattr(self._hook, "seed", 0),
        )
        local, collectives, _ = self._run(self._hook.reduce(bucket, comm))
        exchanges = tuple(self._exchange(exchange) for exchange in comm.begun)
        return BucketTrace(bucket.buffer().nbytes, 0.0, 0.0, local, collectives, exchanges)

    def _exchange(self, exchange: Exchange) -> BucketTrace:
        assert exchange.run is not None
        local, collectives, result = self._run(exchange.run())
        exchange.future = completed(result)
        self._begun.append(exchange)
        return BucketTrace(0, 0.0, 0.0, local, collectives)

    def _run(
        self, coroutine: Coroutine[Any, Any, Tensor]
    ) -> tuple[tuple[float, ...], tuple[Collective, ...], Tensor]:
        """Run a coroutine to its end; return its local seconds, collectives and result."""
        local: list[float] = []
        collectives: list[Collective] = []
        seconds = 0.0
        while True:
            self._scratch.add_(1)
            start = self._clock()
            try:
                pending = coroutine.send(None)
            except StopIteration as stop:
                local.append(seconds + self._clock() - start)
                return tuple(local), tuple(collectives), stop.value
            except CommHookError:
                raise
            except Exception as error:
                raise CommHookError(
                    f"hook {self._hook!r} cannot be simulated: among {self._size} ranks that all "
                    f"hold the same gradients it raised {type(error).__name__}: {error}"
                ) from error
            seconds += self._clock() - start
            if isinstance(pending, Exchange):
                self._awaited.add(pending)
                continue
            members = len(pending.members) or self._size
            if members == 1:
                continue  # nothing is sent, so the hook's work continues
            local.append(seconds)
            seconds = 0.0
            group = _FakeGroup(members)
            pending.start(cast("dist.ProcessGroup", group))
            collectives.append(
                Collective(
                    pending.operation,
                    group.tensor_bytes,
                    Members.of(pending.members, self._size, self._ranks_per_node, pending.parallel),
                )
            )


def fake_group(size: int) -> dist.ProcessGroup:
    """Return a group of ``size`` ranks, see Note [Fake groups]."""
    return cast("dist.ProcessGroup", _FakeGroup(size))


def _typical_steps(
    hook: CommHook, buckets: Sequence[GradBucket], size: int, first: int
) -> dict[int, float]:
    """Return one step of each kind, from step ``first`` on, with the share of steps of its kind.

    Two steps are of one kind if the cost formula of the hook gives the same bytes for both:
    ``local_sgd`` with a period of 8 has two kinds. If there are many kinds, as in a warm-up, steps
    at equal distances stand for all of them. A hook without a formula gets two consecutive steps,
    because some hooks alternate.
    """
    kinds: dict[tuple[int | None, ...], int] = {}
    counts: Counter[int] = Counter()
    for step in range(first, first + _WINDOW):
        sent = _sent_bytes(hook, buckets, size, step)
        if None in sent:
            return {first: 0.5, first + 1: 0.5}
        counts[kinds.setdefault(sent, step)] += 1
    if len(counts) > _MOST_KINDS:
        distance = _WINDOW // _MOST_KINDS
        return {first + i * distance: 1 / _MOST_KINDS for i in range(_MOST_KINDS)}
    return {step: count / _WINDOW for step, count in counts.items()}


def _sent_bytes(
    hook: CommHook, buckets: Sequence[GradBucket], size: int, step: int
) -> tuple[int | None, ...]:
    """Return the bytes that a rank sends for each bucket in a step, by the cost formula."""
    return tuple(hook.wire_bytes(bucket_with(b, b.buffer(), step=step), size) for b in buckets)


def usual_ratio(name: str, size: int = 8, edge: int = 1024) -> float | None:
    """Return the bytes of plain averaging divided by those of a hook with its default options.

    For a square matrix on ``size`` ranks, after all warm-ups, by the cost formula of the hook; None
    if it has no formula or cannot be made by its name.
    """
    matrix = torch.zeros(edge, edge)
    bucket = GradBucket(matrix.view(-1), [nn.Parameter(matrix)], ["weight"])
    steps = range(_LATE, _LATE + _PERIODS)
    try:
        hook = create(name)
        prepare_all(hook, {"weight": matrix}, fake_group(size), ModelInfo({}))
        sent = [_sent_bytes(hook, [bucket], size, step)[0] for step in steps]
    except Exception:  # other packages' hooks may raise anything
        return None
    known = [count for count in sent if count is not None]
    if len(known) < len(sent) or not any(known):
        return None
    return all_reduce_bytes(matrix.nbytes, size) * len(steps) / sum(known)


def check_kernels(specs: Iterable[HookSpec], device: Device) -> None:
    """Raise CommHookError if the kernels of a hook cannot run on the device.

    Registration is tried on tensors that stand for those of the device. Other reasons against a
    hook, which depend on the model, do not count.
    """
    try:
        require(torch.device(device.type))
    except CommHookError as missing:
        needing = []
        for spec in specs:
            with patch.dict(BACKENDS, meta=BACKENDS[device.type]):
                try:
                    tensors = {"": torch.empty(1, device="meta")}
                    prepare_all(spec.create(), tensors, fake_group(2))
                except CommHookError as error:
                    needing += [spec.text] * (str(missing) in str(error))
        if needing:
            names = ", ".join(needing)
            raise CommHookError(f"{names}: {missing}; or measure on the device 'cpu'") from missing


def as_launched(ranks_per_node: int) -> AbstractContextManager[object]:
    """Set the environment of rank 0 as a launcher does, for hooks that group ranks by node."""
    return patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node), LOCAL_RANK="0")


class _FakeGroup:
    """The methods of a process group that hooks and communicators call, among equal ranks.

    ``tensor_bytes`` are those that rank 0 passed to the last collective.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.tensor_bytes = 0

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        (tensor,) = tensors
        self.tensor_bytes = tensor.nbytes
        if options.reduceOp == ReduceOp.SUM:
            tensor.mul_(self._size)
        elif options.reduceOp == ReduceOp.PRODUCT:
            tensor.pow_(self._size)

    def _allgather_base(self, gathered: Tensor, own: Tensor) -> None:
        self.tensor_bytes = own.nbytes
        gathered.view(self._size, -1).copy_(own.view(1, -1).expand(self._size, -1))

    def alltoall_base(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],  # noqa: ARG002
    ) -> None:
        """Receive the parts for rank 0; with sizes, receive whole tensors from some ranks."""
        self.tensor_bytes = sent.nbytes
        part = sent.view(-1) if received_sizes else sent.view(self._size, -1)[0]
        if received.numel() > 0:
            parts = received.view(-1, part.numel())
            parts.copy_(part.expand_as(parts))

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, options: Any) -> None:  # noqa: ARG002
        self.tensor_bytes = whole.nbytes
        part.copy_(whole.chunk(self._size)[0]).mul_(self._size)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> None:  # noqa: ARG002
        self.tensor_bytes = tensors[0].nbytes
