"""Replay the trace of a step: what overlaps with what, and what waits for what.

::

    backward        ▓▓▓ b0 ▓▓▓▓▓ b1 ▓▓▓▓ b2          unpack b0 ▓ ... ▓ ►
    hook's thread       ▓▓        ▓▓ ▓▓   ▓▓ ▓▓          one at a time, in order of arrival
    stage group 0         ═══b0═══  ═══b1═══  ═══b2═══
    stage group 1                   ═══b0═══  ═══b1═══ ...

Threads share the cores, and collectives share the links. This is a fluid model: at every moment
each user of a resource gets an equal share of its capacity. An event is the moment at which some
use ends, so the number of events does not depend on amounts. Collectives are issued in the order
that Note [Order of collectives] in comm/issue_order.py gives, and the collectives of one stage
group run one after the other. A native hook has no thread and uses the process group itself.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from commhooks.comm.issue_order import in_turn
from commhooks.costs.backends import Backend
from commhooks.costs.network import Network
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace

_CROWDED = 0.9
"""The usable share of cores that have more threads than they can run at once. On 2 cores, backward
passes of 3 and of 4 ranks took 1.11 and 1.10 times as long as equal shares of the cores predict."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one step on every rank, and the number of simulated ``events``."""

    forward_seconds: float
    backward_seconds: float
    """The time until all averages are written back."""
    exposed_seconds: float
    """The part of ``backward_seconds`` that communication adds."""
    events: int

    @property
    def step_seconds(self) -> float:
        """Forward and backward, without the optimizer."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Interval:
    """Something that took time. Seconds count from the start of backward."""

    work: str
    """``backward`` (with packing), ``unpack``, ``hook``, or the operation of a collective."""
    bucket: int
    start: float
    end: float


def replay(
    trace: StepTrace,
    network: Network,
    backend: Backend,
    cores: float,
    intervals: list[Interval] | None = None,
) -> Timing:
    """Time a step on ``network``. The threads of a rank share ``cores`` cores.

    Appends what happened to ``intervals``, in the order of ends.
    """
    step = _Replay(trace, network, backend, cores, intervals)
    _run(step.backward())
    seconds = step.clock.run()
    slowdown = 1.0 / Resource(cores, limit=1.0, crowded=_CROWDED).speed()
    return Timing(
        forward_seconds=trace.forward_seconds * slowdown,
        backward_seconds=seconds,
        exposed_seconds=max(0.0, seconds - trace.backward_seconds * slowdown),
        events=step.clock.events,
    )


@dataclass(eq=False)
class Resource:
    """``capacity`` units per second, shared equally; one user gets at most ``limit``.

    When the shares are smaller than ``limit``, users get in each other's way and only the fraction
    ``crowded`` of the capacity is used.
    """

    capacity: float = math.inf
    limit: float = math.inf
    crowded: float = 1.0
    users: int = 0

    def speed(self) -> float:
        """Return the units per second that each user gets."""
        share = self.capacity / max(1, self.users)
        return self.limit if share >= self.limit else share * self.crowded


@dataclass(eq=False)
class _Use:
    resource: Resource
    remaining: float
    then: Callable[[], None]


class EventClock:
    """Advances from event to event until no use is left, and calls back when a use ends."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._uses: list[_Use] = []
        self._delay = Resource(limit=1.0)

    def use(self, resource: Resource, amount: float, then: Callable[[], None]) -> None:
        """Call ``then`` when ``amount`` units of ``resource`` have been used."""
        resource.users += 1
        self._uses.append(_Use(resource, amount, then))

    def wait(self, seconds: float, then: Callable[[], None]) -> None:
        """Call ``then`` after ``seconds``, independently of all resources."""
        self.use(self._delay, seconds, then)

    def run(self) -> float:
        """Run until no use is left, and return the time of the last event."""
        while self._uses:
            self.events += 1
            pending = [use.remaining / use.resource.speed() for use in self._uses]
            elapsed = min(pending)
            for use in self._uses:
                use.remaining -= elapsed * use.resource.speed()
            done = [
                use for use, seconds in zip(self._uses, pending, strict=True) if seconds <= elapsed
            ]
            self.now += elapsed
            self._uses = [use for use in self._uses if use not in done]
            for use in done:
                use.resource.users -= 1
            for use in done:
                use.then()
        return self.now


_Wait = Callable[[Callable[[], None]], None]
"""Begins something, and calls its argument when that has ended."""
_Process = Iterator[_Wait]
"""Continues when the last thing that it has yielded has ended."""


def _run(process: _Process) -> None:
    wait = next(process, None)
    if wait is not None:
        wait(lambda: _run(process))


class _Queue:
    """Lets ``width`` processes in at once, in the order in which they come."""

    def __init__(self, width: int) -> None:
        self._free = width
        self._waiting: deque[Callable[[], None]] = deque()

    def enter(self, then: Callable[[], None]) -> None:
        self._waiting.append(then)
        self._next()

    def leave(self) -> None:
        self._free += 1
        self._next()

    def _next(self) -> None:
        if self._free and self._waiting:
            self._free -= 1
            self._waiting.popleft()()


@dataclass(eq=False)
class _Execution:
    """The hook's execution on one bucket. ``issued`` counts its collectives by members."""

    trace: BucketTrace
    index: int
    pending: Collective | None = None
    issued: dict[Members, int] = field(default_factory=dict)
    is_finished: bool = False
    on_completed: Callable[[], None] = lambda: None
    on_finished: Callable[[], None] = lambda: None

    @property
    def completed(self) -> dict[Members, int]:
        return self.issued  # what is issued early queues in its group

    def collective(self, then: Callable[[], None]) -> None:
        """Wait for the collective that is pending."""
        self.on_completed = then

    def end(self, then: Callable[[], None]) -> None:
        """Wait until the execution has finished."""
        if self.is_finished:
            then()
        else:
            self.on_finished = then


class _Replay:
    def __init__(
        self,
        trace: StepTrace,
        network: Network,
        backend: Backend,
        cores: float,
        intervals: list[Interval] | None,
    ) -> None:
        self._trace = trace
        self._intervals = intervals
        self._network = network
        self._backend = backend
        self.clock = EventClock()
        self._cores = Resource(cores, limit=1.0, crowded=_CROWDED)
        self._link = Resource(network.link.bytes_per_second)
        self._node_link = Resource(network.node_link.bytes_per_second)
        self._executions = [_Execution(bucket, i) for i, bucket in enumerate(trace.buckets)]
        self._launched: list[_Execution] = []  # unfinished, in bucket order
        self._thread = _Queue(1)  # of the hook
        self._groups: dict[tuple[Members, int | None], _Queue] = {}
        self._has_stage_groups = backend.has_stage_groups and not trace.is_native
        self._has_sent = False

    def backward(self) -> _Process:
        """Launch the hook bucket by bucket, then unpack averages in this order."""
        for execution in self._executions:
            yield from self._work("backward", execution, execution.trace.backward_seconds)
            self._launched.append(execution)
            _run(self._hook(execution))
        for execution in self._executions:
            yield execution.end
            yield from self._work("unpack", execution, execution.trace.unpack_seconds)

    def _hook(self, execution: _Execution) -> _Process:
        trace = execution.trace
        for seconds, awaited in zip(trace.local_seconds, (*trace.collectives, None), strict=True):
            if self._trace.is_native:
                yield partial(self.clock.use, self._cores, seconds)
            else:
                yield self._thread.enter
                yield from self._work("hook", execution, seconds)
            execution.pending = awaited or self._vote(execution)
            if execution.pending is None:
                self._finish(execution)
            self._give_turns()
            if not self._trace.is_native:
                self._thread.leave()
            if not execution.is_finished:
                yield execution.collective
        if not execution.is_finished:  # it has voted
            self._finish(execution)

    def _vote(self, execution: _Execution) -> Collective | None:
        """Return the vote of a step, see Note [All ranks or none] in step_scheduler.py."""
        if execution is not self._executions[-1] or not (self._has_sent and self._has_stage_groups):
            return None
        network = self._network
        return Collective("vote", 0.0, Members(network.ranks_per_node, network.nodes > 1))

    def _finish(self, execution: _Execution) -> None:
        execution.is_finished = True
        self._launched.remove(execution)
        execution.on_finished()

    def _give_turns(self) -> None:
        for execution in in_turn(list(self._launched)):
            assert execution.pending is not None
            collective, execution.pending = execution.pending, None
            self._has_sent = True
            stage = execution.issued.get(collective.members, 0)
            execution.issued[collective.members] = stage + 1
            _run(self._execute(execution, collective, stage))

    def _execute(self, execution: _Execution, collective: Collective, stage: int) -> _Process:
        """Wait for the latency, then use the links and the cores at the same time."""
        has_stages = self._has_stage_groups  # each of which executes one collective at a time
        key = collective.members, stage if has_stages else None
        width = 1 if has_stages else self._backend.concurrent
        group = self._groups.setdefault(key, _Queue(width))
        cost = self._backend.cost(collective, self._network)
        uses = [
            (self._link, cost.link_bytes),
            (self._node_link, cost.node_bytes),
            (self._cores, cost.cpu_seconds),
        ]
        uses = [(resource, amount) for resource, amount in uses if amount > 0]
        yield group.enter
        start = self.clock.now
        yield partial(self.clock.wait, cost.latency_seconds)
        if uses:
            yield partial(self._use_all, uses)
        self._record(collective.operation, execution, start)
        group.leave()
        execution.on_completed()

    def _use_all(self, uses: list[tuple[Resource, float]], then: Callable[[], None]) -> None:
        left = len(uses)

        def done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then()

        for resource, amount in uses:
            self.clock.use(resource, amount, done)

    def _work(self, work: str, execution: _Execution, seconds: float) -> _Process:
        start = self.clock.now
        yield partial(self.clock.use, self._cores, seconds)
        self._record(work, execution, start)

    def _record(self, work: str, execution: _Execution, start: float) -> None:
        if self._intervals is not None and self.clock.now > start:
            self._intervals.append(Interval(work, execution.index, start, self.clock.now))
