"""Steps of several ranks in one process: the real scheduler on simulated connections.

Each rank has a :class:`StepScheduler` and an :class:`ExchangeScheduler` with real executions,
communicators and stage groups, each on a thread. Below them, the store and Gloo are simulated, and
one thread runs at a time. Whenever it waits, and at every access to the store, a random generator
decides which one goes on, and with which event: the launch of its next bucket, a call from the
other thread of its rank, or any collective that has completed.
"""

import functools
import random
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import commhooks
from commhooks.comm import stage_groups
from commhooks.comm.exchange import Exchange
from commhooks.comm.stage_groups import StageKey
from commhooks.runtime.exchange_scheduler import ExchangeScheduler
from commhooks.runtime.execution import EndOfStep, HookExecution
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stats import StatsCollector
from commhooks.runtime.step_scheduler import StepScheduler
from support.simulated_connections import Connection, Group, Store, Work

Program = Sequence[Sequence[tuple[int, ...]]]
"""For each bucket the collectives of its hook: the ranks that take part, all if empty."""
ALL: tuple[int, ...] = ()
_MOST_EVENTS = 20_000  # ten times what the largest programs need
_OF_EXCHANGES = 1000  # added to the bucket in the tags of their collectives


@dataclass(frozen=True)
class Plan:
    """The collectives of an exchange that each bucket begins in each step, and its steps."""

    stages: Sequence[tuple[int, ...]]
    delay: int
    once: bool = False
    """Whether only the first step begins any."""


@dataclass(frozen=True)
class Fault:
    """A hook that raises before ``stage`` of ``bucket``; or a backward that ends before ``bucket``.

    The stage after the last one is the end of the hook. ``in_exchange``: the exchange raises that
    begins in this step, on this bucket.
    """

    rank: int
    step: int
    bucket: int
    stage: int | None = None
    in_exchange: bool = False

    @property
    def text(self) -> str:
        return f"fault on rank {self.rank}"


@dataclass
class Programmed(commhooks.CommHook):
    """Awaits the collectives of a program, and checks their results."""

    program: Program = field(default=(), init=False, compare=False)
    exchange: "Plan | None" = field(default=None, init=False, compare=False)
    faults: Sequence[Fault] = field(default=(), init=False, compare=False)
    recovered: int = field(default=0, init=False, compare=False)
    taken: int = field(default=0, init=False, compare=False)
    begun: dict[tuple[int, int], Exchange] = field(default_factory=dict, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        index = bucket.index()
        await self._send(comm, index, self.program[index])
        if self.exchange is not None:
            exchange = functools.partial(
                self._send, index=index, stages=self.exchange.stages, in_exchange=True
            )
            if comm.step == 0 or not self.exchange.once:
                self.begun[comm.step, index] = comm.begin(exchange)
            due = self.begun.pop((comm.step - self.exchange.delay, index), None)
            if due is not None:
                total = await due
                assert total.tolist() == [comm.step - self.exchange.delay, index]
                self.taken += 1
        return bucket.buffer()

    async def _send(
        self,
        comm: commhooks.Communicator,
        index: int,
        stages: Sequence[tuple[int, ...]],
        *,
        in_exchange: bool = False,
    ) -> Tensor:
        for stage, members in enumerate(stages):
            self._break(comm, index, stage, in_exchange)
            if members and comm.rank not in members:
                continue
            group = comm.among(members) if members else comm
            tag = [index + _OF_EXCHANGES * in_exchange, float(stage), float(comm.step)]
            total = await group.all_reduce(torch.tensor([*tag, comm.rank + 1.0]))
            expected = sum(rank + 1.0 for rank in members or range(comm.size))
            assert total.tolist() == [*tag, expected]
        self._break(comm, index, len(stages), in_exchange)
        return torch.tensor([comm.step, index])

    def _break(
        self, comm: commhooks.Communicator, bucket: int, stage: int, in_exchange: bool
    ) -> None:
        for fault in self.faults:
            if fault == Fault(comm.rank, comm.step, bucket, stage, in_exchange):
                raise ValueError(fault.text)

    def recover(self) -> None:
        self.recovered += 1
        self.begun.clear()


@dataclass
class Outcome:
    """The errors of each rank: ``errors[rank][step]`` is a list, empty if the step succeeded."""

    errors: list[list[list[BaseException]]]
    groups: int
    """How many process groups were connected, over all ranks."""
    recovered: list[int]
    votes: int
    taken: list[int]
    """How many exchanges each rank has awaited."""


def run_steps(
    size: int,
    program: Program,
    steps: int,
    seed: int,
    *faults: Fault,
    knows_last: bool = True,
    exchange: Plan | None = None,
) -> Outcome:
    """Run some steps of ``size`` ranks in an order that follows from ``seed``.

    Unless ``knows_last``, no bucket is marked as the last, and an end of step follows.

    Raises AssertionError if connections are misused, or if the ranks wait for each other.
    """
    world = _World(size, program, steps, random.Random(seed), faults, knows_last, exchange)
    with world.installed():
        world.run()
    return Outcome(
        [[list(errors) for errors in rank.errors] for rank in world.ranks],
        sum(len(connection.members) for connection in world.connections.values()),
        [rank.hook.recovered for rank in world.ranks],
        world.votes,
        [rank.hook.taken for rank in world.ranks],
    )


class _Over(BaseException):
    """Ends the thread of a rank."""


class _World:
    def __init__(
        self,
        size: int,
        program: Program,
        steps: int,
        draw: random.Random,
        faults: Sequence[Fault],
        knows_last: bool,
        exchange: Plan | None,
    ) -> None:
        self.exchange = exchange
        self.size, self.program, self.steps, self.faults = size, program, steps, faults
        self.knows_last = knows_last
        self.draw = draw
        self.values: dict[str, bytes] = {}  # of the store
        self.connections: dict[str, Connection] = defaultdict(lambda: Connection(self))
        self.votes = 0
        self.version = 0  # of what ranks may wait for
        self.baton = threading.Semaphore(0)
        self.misuse = ""
        self.is_over = False
        self.current: _Actor
        self.ranks: list[_Rank] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        def connect(*arguments: Any) -> Group:
            return Group(self, *arguments)

        connect._Options = SimpleNamespace  # type: ignore[attr-defined]
        with patch.multiple(
            stage_groups,
            ProcessGroupGloo=connect,
            PrefixStore=Store,
            time=SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: self.wait()),
            start_thread=lambda _, clear: clear.__self__[0].drop(),  # a list with the group
        ):
            yield

    def run(self) -> None:
        self.ranks = [_Rank(self, rank) for rank in range(self.size)]
        try:
            for _ in range(_MOST_EVENTS):
                events = [event for actor in self._actors() for event in actor.events()]
                if not events or self.misuse:
                    break
                self.current, event = self.draw.choice(events)
                self.current.resume(event)
        finally:
            self.is_over = True
            is_finished = [actor.is_finished for actor in self._actors()]
            for actor in self._actors():
                actor.end()
        assert not self.misuse, self.misuse
        assert all(is_finished), "the ranks wait for each other"

    def _actors(self) -> Iterator["_Actor"]:
        for rank in self.ranks:
            yield rank
            yield rank.exchanges

    def change(self) -> None:
        """Wake up ranks that wait for something."""
        self.version += 1

    def yield_(self) -> None:
        """Let other ranks run, perhaps."""
        self.current.pause(None)

    def wait(self, timeout: object = None) -> None:
        """Let other ranks run, unless nothing has changed since this rank last waited."""
        rank = self.current
        rank.pause(rank.seen)
        rank.seen = self.version

    def report(self, misuse: str) -> None:
        self.misuse = self.misuse or misuse


class _Actor(ABC):
    """A thread of a rank, which runs only while :meth:`resume` is called."""

    def __init__(self, world: _World) -> None:
        self.world = world
        self.completed: list[Callable[[], None]] = []  # what to call after a collective
        self.works: list[Work] = []
        self.calls: deque[Callable[[], None]] = deque()  # from the other thread of the rank
        self.is_paused = False  # within an event
        self.waits_for: int | None = None  # a later version of the world
        self.seen = -1  # the version when this rank last stopped waiting
        self.event: Callable[[], None] | None = None
        self.baton = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""

    # ---------------------------------------------------------------------- from the world's thread

    def events(self) -> Iterator[tuple["_Actor", Callable[[], None] | None]]:
        """Yield what may happen on this thread now."""
        if self.is_paused:
            if self.waits_for is None or self.waits_for < self.world.version:
                yield self, None
            return
        for function in self.completed:
            yield self, functools.partial(self._complete, function)
        if self.calls:
            yield self, lambda: self.calls.popleft()()

    def resume(self, event: Callable[[], None] | None) -> None:
        """Run until the event is over, or the thread pauses in it. None: the present event."""
        if event is not None:
            self.event = event
        self.baton.release()
        self.world.baton.acquire()

    def end(self) -> None:
        self.event = None
        self.baton.release()
        if self.is_paused:  # it ends the event first
            self.world.baton.acquire()
            self.baton.release()
        self.thread.join()

    # ----------------------------------------------------------------------------- on the thread

    def pause(self, version: int | None) -> None:
        if not self.world.is_over:
            self.is_paused, self.waits_for = True, version
            self.world.baton.release()
            self.baton.acquire()
        if self.world.is_over:
            raise _Over
        self.is_paused = False

    @torch.no_grad()
    def _main(self) -> None:
        while True:
            self.baton.acquire()
            if self.event is None:
                return
            try:
                self.event()
            except _Over:
                pass
            except Exception as error:
                self.world.report(f"the scheduler raised {error!r}")
            self.world.baton.release()

    def _complete(self, function: Callable[[], None]) -> None:
        self.completed.remove(function)
        function()

    def call(self, function: Callable[[], None]) -> None:
        """As :class:`HookThread` does."""
        self.calls.append(function)

    def watch(self, key: StageKey, work: Any) -> None:
        """As :class:`Waiters` do."""
        work.then = functools.partial(self._continue, key)
        self.works.append(work)
        if work.is_over:
            self.completed.append(work.then)

    @abstractmethod
    def _continue(self, key: StageKey) -> None:
        """Let the scheduler continue after a collective."""


class _Exchanges(_Actor):
    """The thread of exchanges of a rank, as :class:`ThreadedRunner` has it."""

    def __init__(self, rank: "_Rank") -> None:
        super().__init__(rank.world)
        groups = stage_groups.StageGroups(rank.group, token=7, purpose="exchanges")
        self.scheduler = ExchangeScheduler(rank.rank, groups, self)
        self.scheduler.on_end = rank.continue_after

    @property
    def is_finished(self) -> bool:
        return not (self.calls or self.completed or self.is_paused or self.scheduler.unfinished)

    def is_alive(self) -> bool:
        return True

    def _continue(self, key: StageKey) -> None:
        self.scheduler.complete(key)

    def wait(self) -> None:
        """Do nothing: exchanges here have no state that recover() changes."""


class _Rank(_Actor):
    """The thread of the steps of a rank."""

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(world)
        self.rank = rank
        self.hook = Programmed()
        self.hook.program, self.hook.faults = world.program, world.faults
        self.hook.exchange = world.exchange
        self.errors: list[list[BaseException]] = [[] for _ in range(world.steps)]
        self.step = self.bucket = 0  # to be launched next
        self.unfinished = 0
        self.group: Any = SimpleNamespace(
            rank=lambda: rank,
            size=lambda: world.size,
            get_group_store=lambda: Store("", world),
            _get_backend=lambda _: SimpleNamespace(
                options=SimpleNamespace(
                    _timeout=SimpleNamespace(total_seconds=lambda: 600.0), _devices=[]
                )
            ),
        )
        self.exchanges = _Exchanges(self)
        threads: Any = self, self.exchanges  # in place of Waiters and a HookThread
        self.scheduler = StepScheduler(
            self.hook,
            self.group,
            stage_groups.StageGroups(self.group, token=7),
            threads[0],
            SideStream(torch.device("cpu")),
            StatsCollector(),
            self.exchanges.scheduler,
            threads[1],
        )

    @property
    def is_finished(self) -> bool:
        return self.step == self.world.steps and not self.unfinished and not self.is_paused

    def continue_after(self, exchange: HookExecution) -> None:
        """Called on the thread of exchanges."""
        self.call(lambda: self.scheduler.continue_after(exchange))

    def _continue(self, key: StageKey) -> None:
        self.scheduler.complete(key)

    def events(self) -> Iterator[tuple[_Actor, Callable[[], None] | None]]:
        yield from super().events()
        if self.is_paused:
            return
        if self.step < self.world.steps and (self.bucket > 0 or not self.unfinished):
            yield self, self._launch

    def _launch(self) -> None:
        step, index, count = self.step, self.bucket, len(self.world.program)
        if self._ends_early(step, index):
            self._next_step()
            self.scheduler.abort_incomplete(has_run=index > 0)
            return
        if not self.world.knows_last:
            count += 1
        execution = self._execution(step, index, count)
        self.unfinished += 1
        execution.future.add_done_callback(lambda future: self._finish(future, step, index))
        self.bucket += 1
        if self.bucket == count:
            self._next_step()
        self.scheduler.launch(execution)

    def _execution(self, step: int, index: int, count: int) -> HookExecution:
        if index == len(self.world.program):
            nothing = commhooks.GradBucket(torch.empty(0), [], [], index=index, step=step)
            return EndOfStep(self.hook, nothing, self.group)
        weight = torch.nn.Parameter(torch.zeros(1))
        bucket = commhooks.GradBucket(
            torch.zeros(1),
            [weight],
            [f"w{index}"],
            index=index,
            is_last=index + 1 == count,
            step=step,
        )
        return HookExecution(self.hook, bucket, self.group)

    def _ends_early(self, step: int, index: int) -> bool:
        return any(
            (fault.rank, fault.step, fault.bucket, fault.stage) == (self.rank, step, index, None)
            for fault in self.world.faults
        )

    def _next_step(self) -> None:
        self.step, self.bucket = self.step + 1, 0

    def _finish(self, future: torch.futures.Future[Tensor], step: int, bucket: int) -> None:
        self.unfinished -= 1
        try:
            future.value()
        except Exception as error:
            self.errors[step].append(error)
        if any(not work.is_over and work.tag[:1] == [bucket] for work in self.works):
            self.world.report(f"the future of bucket {bucket} was set while its buffer was in use")
