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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

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
    step.clock.go_on(step.backward())
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
class Use:
    """``remaining`` units of a resource that a process needs."""

    resource: Resource
    remaining: float


class Gate:
    """Lets processes pass in the order in which they come, as many as it is opened for."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.waiting: deque[Process] = deque()


Process: TypeAlias = Iterator[Sequence[Use] | Gate]
"""Continues when all uses that it has yielded have ended, or when the gate lets it pass."""


class EventClock:
    """Runs processes, from event to event, until no use is left."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._uses: list[tuple[Use, list[Use], Process]] = []
        self._delay = Resource(limit=1.0)

    def delay(self, seconds: float) -> list[Use]:
        """Return what takes ``seconds``, independently of all resources."""
        return [Use(self._delay, seconds)]

    def go_on(self, process: Process) -> None:
        """Run a process to the next thing that it waits for."""
        awaited = next(process, None)
        if isinstance(awaited, Gate):
            awaited.waiting.append(process)
            self.open(awaited, 0)
        elif awaited is not None:
            left = list(awaited)
            for use in awaited:
                use.resource.users += 1
                self._uses.append((use, left, process))

    def open(self, gate: Gate, more: int = 1) -> None:
        """Let ``more`` processes pass."""
        gate.free += more
        while gate.free and gate.waiting:
            gate.free -= 1
            self.go_on(gate.waiting.popleft())

    def run(self) -> float:
        """Run until no use is left, and return the time of the last event."""
        while self._uses:
            self.events += 1
            seconds = [use.remaining / use.resource.speed() for use, _, _ in self._uses]
            elapsed = min(seconds)
            for use, _, _ in self._uses:
                use.remaining -= elapsed * use.resource.speed()
            ended = [
                each for each, left in zip(self._uses, seconds, strict=True) if left <= elapsed
            ]
            self.now += elapsed
            self._uses = [each for each in self._uses if each not in ended]
            for use, _, _ in ended:
                use.resource.users -= 1
            for use, left, process in ended:
                left.remove(use)
                if not left:
                    self.go_on(process)
        return self.now


@dataclass(eq=False)
class _Execution:
    """The hook's execution on one bucket. ``issued`` counts its collectives by members."""

    trace: BucketTrace
    index: int
    pending: Collective | None = None
    issued: dict[Members, int] = field(default_factory=dict)
    sent: Gate = field(default_factory=Gate)  # opened when a collective has ended
    end: Gate = field(default_factory=Gate)

    @property
    def completed(self) -> dict[Members, int]:
        return self.issued  # what is issued early queues in its group


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
        self._thread = Gate(1)  # of the hook
        self._groups: dict[tuple[Members, int | None], Gate] = {}
        self._has_stage_groups = backend.has_stage_groups and not trace.is_native
        self._has_sent = False

    def backward(self) -> Process:
        """Launch the hook bucket by bucket, then unpack averages in this order."""
        for execution in self._executions:
            yield from self._work("backward", execution, execution.trace.backward_seconds)
            self._launched.append(execution)
            self.clock.go_on(self._hook(execution))
        for execution in self._executions:
            yield execution.end
            yield from self._work("unpack", execution, execution.trace.unpack_seconds)

    def _hook(self, execution: _Execution) -> Process:
        trace, is_native = execution.trace, self._trace.is_native
        for seconds, awaited in zip(trace.local_seconds, (*trace.collectives, None), strict=True):
            if is_native:
                yield [Use(self._cores, seconds)]
            else:
                yield self._thread
                yield from self._work("hook", execution, seconds)
            execution.pending = awaited or self._vote(execution)
            has_finished = execution.pending is None
            if has_finished:
                self._finish(execution)
            self._give_turns()
            if not is_native:
                self.clock.open(self._thread)
            if has_finished:
                return
            yield execution.sent
        self._finish(execution)  # it has voted

    def _vote(self, execution: _Execution) -> Collective | None:
        """Return the vote of a step, see Note [All ranks or none] in step_scheduler.py."""
        if execution is not self._executions[-1] or not (self._has_sent and self._has_stage_groups):
            return None
        network = self._network
        return Collective("vote", 0.0, Members(network.ranks_per_node, network.nodes > 1))

    def _finish(self, execution: _Execution) -> None:
        self._launched.remove(execution)
        self.clock.open(execution.end)

    def _give_turns(self) -> None:
        for execution in in_turn(list(self._launched)):
            assert execution.pending is not None
            collective, execution.pending = execution.pending, None
            self._has_sent = True
            stage = execution.issued.get(collective.members, 0)
            execution.issued[collective.members] = stage + 1
            self.clock.go_on(self._execute(execution, collective, stage))

    def _execute(self, execution: _Execution, collective: Collective, stage: int) -> Process:
        """Wait for the latency, then use the links and the cores at the same time."""
        has_stages = self._has_stage_groups  # each of which executes one collective at a time
        key = collective.members, stage if has_stages else None
        group = self._groups.setdefault(key, Gate(1 if has_stages else self._backend.concurrent))
        cost = self._backend.cost(collective, self._network)
        yield group
        start = self.clock.now
        yield self.clock.delay(cost.latency_seconds)
        uses = [
            Use(self._link, cost.link_bytes),
            Use(self._node_link, cost.node_bytes),
            Use(self._cores, cost.cpu_seconds),
        ]
        uses = [use for use in uses if use.remaining > 0]
        if uses:
            yield uses
        self._record(collective.operation, execution, start)
        self.clock.open(group)
        self.clock.open(execution.sent)

    def _work(self, work: str, execution: _Execution, seconds: float) -> Process:
        start = self.clock.now
        yield [Use(self._cores, seconds)]
        self._record(work, execution, start)

    def _record(self, work: str, execution: _Execution, start: float) -> None:
        if self._intervals is not None and self.clock.now > start:
            self._intervals.append(Interval(work, execution.index, start, self.clock.now))
