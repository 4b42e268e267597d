"""Plays the script of a step: what overlaps with what, and what waits for what.

::

    backward     ▓▓▓ b0 ▓▓▓▓▓ b1 ▓▓▓▓ b2          unpack b0 ▓ ... ▓ ►
    hook's           ▓▓        ▓▓ ▓▓   ▓▓ ▓▓          one after the other, in order of arrival
    channel 0          ═══b0═══  ═══b1═══  ═══b2═══
    channel 1                    ═══b0═══  ═══b1═══ ...

Threads share the cores, collectives share the links: see sharing.py. Collectives are issued as
Note [Order of collectives] in comm/issue_order.py says, and those of one channel go one
after the other.
Native hooks have no thread, and the process group's own channel.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from commhooks.comm.issue_order import in_turn
from commhooks.costs.network import Backend, Cost, Network
from commhooks.costs.sharing import Clock, Resource
from commhooks.costs.step_trace import BucketScript, Collective, Members, StepScript

__all__ = ["Timing", "play"]

_CROWDED = 0.9
"""What is left of cores that have more threads than they can run at once: plain backwards of 3 and
of 4 ranks on 2 cores took 1.11 and 1.10 times what shares of 2 cores would make of those of 2."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one step on every rank. ``events``: what it took to find them out."""

    forward_seconds: float
    backward_seconds: float
    """Until all averages are written back."""
    exposed_seconds: float
    """Of them, what there would not be without communication."""
    events: int

    @property
    def step_seconds(self) -> float:
        """Without the optimizer."""
        return self.forward_seconds + self.backward_seconds


def play(script: StepScript, network: Network, backend: Backend, cores: float) -> Timing:
    """A step of ``script``. ``cores``: what a rank has for all of its threads."""
    seconds, events = _Player(script, network, backend, cores).run()
    slowdown = 1.0 / Resource(cores, limit=1.0, crowded=_CROWDED).speed()
    return Timing(
        forward_seconds=script.forward_seconds * slowdown,
        backward_seconds=seconds,
        exposed_seconds=max(0.0, seconds - script.backward_seconds * slowdown),
        events=events,
    )


@dataclass(eq=False)
class _Run:
    """Of the hook on one bucket. ``issued`` counts collectives, by who takes part."""

    script: BucketScript
    pending: Collective | None = None
    position: int = 0
    issued: dict[Members, int] = field(default_factory=dict)
    is_finished: bool = False


class _Channel:
    """Carries so many collectives at once; others queue."""

    def __init__(self, width: int) -> None:
        self._free = width
        self._queue: deque[Callable[[], None]] = deque()

    def put(self, start: Callable[[], None]) -> None:
        self._queue.append(start)
        self._next()

    def release(self) -> None:
        self._free += 1
        self._next()

    def _next(self) -> None:
        if self._free and self._queue:
            self._free -= 1
            self._queue.popleft()()


class _Player:
    def __init__(
        self, script: StepScript, network: Network, backend: Backend, cores: float
    ) -> None:
        self._script = script
        self._network = network
        self._backend = backend
        self._clock = Clock()
        self._cores = Resource(cores, limit=1.0, crowded=_CROWDED)
        link, inner = network.link, network.node_link
        self._link = Resource(link.bytes_per_second, burst=link.burst_bytes)
        self._node_link = Resource(inner.bytes_per_second, burst=inner.burst_bytes)
        self._runs = [_Run(bucket) for bucket in script.buckets]
        self._launched: list[_Run] = []  # unfinished, in bucket order
        self._jobs: deque[tuple[float, Callable[[], None]]] = deque()  # of the hook's thread
        self._hook_is_busy = False
        self._channels: dict[tuple[Members, int | None], _Channel] = {}
        self._drained = 0
        self._is_draining = False
        self._has_sent = False

    def run(self) -> tuple[float, int]:
        """When backward ends, and the number of events."""
        self._go_on(iter(self._runs))
        return self._clock.run(), self._clock.events

    # ------------------------------------------------------------------ the thread of backward

    def _go_on(self, runs: Iterator[_Run]) -> None:
        run = next(runs, None)
        if run is None:
            self._is_draining = True
            self._drain()
            return

        def launch() -> None:
            self._launch(run)
            self._go_on(runs)

        self._clock.use(self._cores, run.script.backward_seconds, launch)

    def _drain(self) -> None:
        """Takes over the averages, in order of buckets, as they come."""
        if not self._is_draining or self._drained == len(self._runs):
            return
        run = self._runs[self._drained]
        if not run.is_finished:
            return
        self._drained += 1
        self._is_draining = False

        def unpacked() -> None:
            self._is_draining = True
            self._drain()

        self._clock.use(self._cores, run.script.unpack_seconds, unpacked)

    # ------------------------------------------------------------------------------- the hook

    def _launch(self, run: _Run) -> None:
        self._launched.append(run)
        self._work(run)

    def _work(self, run: _Run) -> None:
        """Brings the hook to its next collective, or to its end."""
        seconds = run.script.local_seconds[run.position]
        if self._script.is_native:
            self._clock.use(self._cores, seconds, lambda: self._await(run))
            return
        self._jobs.append((seconds, lambda: self._await(run)))
        self._next_job()

    def _next_job(self) -> None:
        if self._hook_is_busy or not self._jobs:
            return
        seconds, then = self._jobs.popleft()
        self._hook_is_busy = True

        def done() -> None:
            self._hook_is_busy = False
            then()
            self._next_job()

        self._clock.use(self._cores, seconds, done)

    def _await(self, run: _Run) -> None:
        collectives = run.script.collectives
        if run.position < len(collectives):
            run.pending = collectives[run.position]
        elif run is self._runs[-1] and self._votes():
            run.pending = self._vote()
        else:
            self._finish(run)
        self._give_turns()

    def _votes(self) -> bool:
        """See Note [All ranks or none] in runtime/scheduler.py."""
        return self._has_sent and self._backend.has_stage_channels and not self._script.is_native

    def _finish(self, run: _Run) -> None:
        run.is_finished = True
        self._launched.remove(run)
        self._drain()

    # ------------------------------------------------------------------------- the collectives

    def _vote(self) -> Collective:
        network = self._network
        return Collective("vote", 0.0, Members(network.ranks_per_node, network.nodes > 1))

    def _give_turns(self) -> None:
        for run in in_turn(list(self._launched)):
            assert run.pending is not None
            self._issue(run, run.pending)

    def _issue(self, run: _Run, collective: Collective) -> None:
        run.pending = None
        self._has_sent = True
        stage = run.issued.get(collective.members, 0)
        run.issued[collective.members] = stage + 1
        channel = self._channel(collective.members, stage)
        cost = self._backend.cost(collective, self._network)

        def completed() -> None:
            channel.release()
            if collective.is_vote:
                self._finish(run)
                return
            run.position += 1
            self._work(run)

        channel.put(lambda: self._carry_out(cost, completed))

    def _channel(self, members: Members, stage: int) -> _Channel:
        is_own = self._backend.has_stage_channels and not self._script.is_native
        key = (members, stage if is_own else None)
        if key not in self._channels:
            self._channels[key] = _Channel(1 if is_own else self._backend.concurrent)
        return self._channels[key]

    def _carry_out(self, cost: Cost, then: Callable[[], None]) -> None:
        """First the latency, then everything else side by side."""
        shares = [
            (self._link, cost.link_bytes),
            (self._node_link, cost.node_bytes),
            (self._cores, cost.cpu_seconds),
        ]
        shares = [(resource, amount) for resource, amount in shares if amount > 0]
        left = len(shares)

        def done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then()

        def begin() -> None:
            for resource, amount in shares:
                self._clock.use(resource, amount, done)

        self._clock.wait(cost.latency_seconds, begin if shares else then)
