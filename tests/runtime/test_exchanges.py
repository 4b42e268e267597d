"""Exchanges between steps: Note [Exchanges between steps] in comm/exchange.py."""

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.states import of_rank
from torch import Tensor
from torch.futures import Future

import commhooks
from commhooks.comm.exchange import Exchange
from commhooks.comm.stage_groups import StageGroups
from commhooks.runtime.hook_thread import HookThread
from commhooks.testing.probe import Trainer, draw_gradients

DELAY = 2


@dataclass
class Late(commhooks.CommHook):
    """Return the average of two steps before, and zeros at first."""

    fails_on: tuple[int, int] = (-1, -1)
    """The rank and step whose exchange fails."""
    keeps: bool = False
    """Whether exchanges are kept when a step has failed, which is wrong."""
    exchanges: dict[tuple[int, str], Exchange] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        own = bucket.buffer().clone()

        async def average(comm: commhooks.Communicator) -> Tensor:
            if (comm.rank, comm.step) == self.fails_on:
                raise ValueError("broken")
            first, second = own.clone().div_(comm.size).chunk(2)
            return torch.cat([await comm.all_reduce(first), await comm.all_reduce(second)])

        self.exchanges[bucket.step, bucket.names[0]] = comm.begin(average)
        due = self.exchanges.pop((bucket.step - DELAY, bucket.names[0]), None)
        if due is None:
            return torch.zeros_like(own)
        for _ in range(2_000):  # more than Python's limit of recursion
            average = await due
        return average

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for (step, name), exchange in self.exchanges.items():
            state.setdefault(name, {})[f"average of {step}"] = exchange.result().clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.exchanges = {}
        for name, entry in state.items():
            for key, average in entry.items():
                self.exchanges[int(key.split()[-1]), name] = Exchange.finished(average)

    def recover(self) -> None:
        if not self.keeps:
            self.exchanges.clear()


def take_steps(trainer: Trainer, rank: int, steps: range) -> list[dict[str, Tensor]]:
    return [trainer.step(draw_gradients(trainer.parameters, rank, step)) for step in steps]


def expected(trainer: Trainer, size: int, step: int) -> dict[str, Tensor]:
    of_ranks = [draw_gradients(trainer.parameters, rank, step - DELAY) for rank in range(size)]
    return {
        name: sum(gradients[name] / size for gradients in of_ranks) for name in trainer.parameters
    }


def check(trainer: Trainer, size: int, found: list[dict[str, Tensor]], first: int) -> None:
    for step, of_step in enumerate(found, first):
        for name, gradient in expected(trainer, size, step).items():
            exact = gradient if step >= DELAY else torch.zeros_like(gradient)
            torch.testing.assert_close(of_step[name], exact, msg=f"{name} in step {step}")


def run_late(rank: int, size: int, torch_ddp: bool, folder: str) -> None:
    # With either option the buckets of the first step are kept.
    options = {"find_unused_parameters": True} if torch_ddp else {"stable_buckets": True}
    trainer = Trainer(Late(), torch_ddp=torch_ddp, **options)
    check(trainer, size, take_steps(trainer, rank, range(4)), 0)

    # The saved state has the results of exchanges that are under way.
    saved = trainer.handle.state_dict()
    assert all(len(entry) == DELAY for entry in of_rank(saved).values())
    check(trainer, size, take_steps(trainer, rank, range(4, 6)), 4)
    trainer.handle.load_state_dict(saved)
    check(trainer, size, take_steps(trainer, rank, range(4, 7)), 4)

    if size > 1:
        trainer.handle.state_dict()  # so that the exchanges are over, and their bytes are counted
        total = trainer.handle.stats().total
        ring = total.gradient_bytes * 2 * (size - 1) / size
        assert total.wire_bytes == pytest.approx(ring, rel=0.01)  # shares of ranks are rounded up
    path = Path(folder) / "trace.json"
    with trainer.handle.trace(path):
        take_steps(trainer, rank, range(7, 8))
        trainer.handle.state_dict()  # so that the exchanges are over
    if rank == 0 and size > 1:
        names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
        assert "exchange" in names

    take_steps(trainer, rank, range(8, 9))
    trainer.handle.replace("allreduce")  # while exchanges are under way
    (average,) = take_steps(trainer, rank, range(DELAY, DELAY + 1))
    for name, gradient in expected(trainer, size, 2 * DELAY).items():
        torch.testing.assert_close(average[name], gradient)
    trainer.handle.replace(Late())
    check(trainer, size, take_steps(trainer, rank, range(4)), 0)
    trainer.handle.remove()


@pytest.mark.parametrize(
    ("size", "torch_ddp"), [(1, False), (2, True), pytest.param(3, False)], ids=str
)
def test_results_of_earlier_steps(
    run_ranks: Any, tmp_path: Path, size: int, torch_ddp: bool
) -> None:
    run_ranks(run_late, size, torch_ddp, str(tmp_path))


def fail_late(rank: int, size: int, keeps: bool) -> None:
    trainer = Trainer(Late(fails_on=(0, 1), keeps=keeps), stable_buckets=True)
    check(trainer, size, take_steps(trainer, rank, range(2)), 0)
    with pytest.raises(commhooks.CommHookError, match="ValueError: broken") as caught:
        # In the step that awaits it, or in the one before if that one's exchange was unfinished.
        take_steps(trainer, rank, range(2, 4))
    assert "in the exchange that it began on bucket" in str(caught.value)
    if keeps:
        with pytest.raises(commhooks.CommHookError, match="aborted because a step failed"):
            take_steps(trainer, rank, range(4, 5 + DELAY))
        return
    # Those that began before the failure are gone.
    found = take_steps(trainer, rank, range(4, 8))
    first = next(step for step, average in enumerate(found) if average["matrix"].any())
    assert first == DELAY
    check(trainer, size, found[first:], 4 + first)


@pytest.mark.parametrize(("size", "keeps"), [(1, False), (2, False), (2, True)])
def test_a_failure_shows_where_the_result_is_awaited(
    run_ranks: Any, size: int, keeps: bool
) -> None:
    run_ranks(fail_late, size, keeps)


@dataclass
class Impatient(commhooks.CommHook):
    """Await an exchange in the step in which it began."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        async def nothing(comm: commhooks.Communicator) -> Tensor:
            return torch.zeros(1)

        return await comm.begin(nothing)


def await_at_once(rank: int, size: int) -> None:
    trainer = Trainer(Impatient())
    with pytest.raises(commhooks.CommHookError, match="an exchange that began in an earlier step"):
        take_steps(trainer, rank, range(1))
    trainer.handle.remove()
    assert dist.is_initialized()


@pytest.mark.parametrize("size", [1, 2])
def test_an_exchange_cannot_be_awaited_in_its_own_step(run_ranks: Any, size: int) -> None:
    run_ranks(await_at_once, size)


@dataclass
class Nested(commhooks.CommHook):
    """Await an exchange in another one."""

    begun: Exchange | None = field(default=None, init=False, repr=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        async def nothing(comm: commhooks.Communicator) -> Tensor:
            return torch.zeros(1)

        async def something(comm: commhooks.Communicator) -> Tensor:
            return await first

        if bucket.index() == 0:
            if self.begun is not None:
                await self.begun
            first = comm.begin(nothing)
            self.begun = comm.begin(something)
        return bucket.buffer()

    def recover(self) -> None:
        self.begun = None


def await_in_an_exchange(rank: int, size: int) -> None:
    trainer = Trainer(Nested())
    take_steps(trainer, rank, range(1))
    with pytest.raises(commhooks.CommHookError, match="can await only what methods of its comm"):
        take_steps(trainer, rank, range(1, 2))


@pytest.mark.parametrize("size", [1, 2])
def test_an_exchange_cannot_await_another_one(run_ranks: Any, size: int) -> None:
    """They end in any order."""
    run_ranks(await_in_an_exchange, size)


@dataclass
class Busy(commhooks.CommHook):
    """Have an exchange that works for a while, and note whether it does when the hook recovers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.goes_on = threading.Event()
        self.works = False
        self.worked_in_recover: bool | None = None

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        async def work(comm: commhooks.Communicator) -> Tensor:
            self.works = True
            self.goes_on.wait(60)
            self.works = False
            return await comm.all_reduce(torch.zeros(1))

        if bucket.step == 0 and bucket.index() == 0:
            comm.begin(work)
        if bucket.step == 1 and comm.rank == 0 and self.worked_in_recover is None:
            raise ValueError("broken")
        return await comm.all_reduce(bucket.buffer().div_(comm.size))

    def recover(self) -> None:
        self.worked_in_recover = self.works
        self.goes_on.set()

    def goes_on_when_waited_for(self, patch: pytest.MonkeyPatch) -> None:
        """Let the exchange go on when its thread is waited for, or else when the hook recovers."""
        wait = HookThread.wait

        def go_on_and_wait(thread: HookThread, *event: threading.Event) -> None:
            if thread._name == "commhooks-exchange":
                self.goes_on.set()
            wait(thread, *event)

        patch.setattr(HookThread, "wait", go_on_and_wait)


def recover_while_busy(rank: int, size: int) -> bool | None:
    hook = Busy()
    trainer = Trainer(hook, stable_buckets=True)
    take_steps(trainer, rank, range(1))
    with pytest.raises(commhooks.CommHookError, match="broken"):
        take_steps(trainer, rank, range(1, 2))
    while not hook.works:
        time.sleep(0.01)
    with pytest.MonkeyPatch.context() as patch:
        hook.goes_on_when_waited_for(patch)
        take_steps(trainer, rank, range(1, 2))
    return hook.worked_in_recover


def test_a_hook_recovers_when_aborted_exchanges_no_longer_run(run_ranks: Any) -> None:
    """They use the state of the hook."""
    assert run_ranks(recover_while_busy, 2) == [False] * 2


def join_while_busy(rank: int, size: int) -> bool | None:
    hook = Busy()
    trainer = Trainer(hook, stable_buckets=True)
    with pytest.MonkeyPatch.context() as patch, trainer.model.join():
        take_steps(trainer, rank, range(1))
        while not hook.works:
            time.sleep(0.01)
        hook.goes_on_when_waited_for(patch)
    return hook.worked_in_recover


def test_join_ends_when_exchanges_are_over(run_ranks: Any) -> None:
    assert run_ranks(join_while_busy, 2) == [False] * 2


def connect_first(rank: int, size: int) -> None:
    connected = []
    connect = StageGroups._connect

    def note(groups: StageGroups, stage: int, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        connected.append(threading.current_thread())
        return connect(groups, stage, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageGroups, "_connect", note)
        model = commhooks.DistributedDataParallel(torch.nn.Linear(3, 2))
        handle = commhooks.register(model, "diloco", period=2, delay=1)
        for _ in range(5):
            model(torch.ones(1, 3)).sum().backward()
        assert handle.stats().total.wire_bytes
    assert set(connected) == {threading.main_thread()}


def test_exchanges_are_connected_before_training(run_ranks: Any) -> None:
    """Otherwise a rank that has died in the meantime is only noticed after the time-out."""
    run_ranks(connect_first, 2)


class NotAwaited(Future[Tensor]):
    """Raises instead of waiting for ever."""

    def wait(self) -> Tensor:
        assert self.done()
        return super().wait()


def test_a_result_is_there_only_at_the_end() -> None:
    async def run(comm: commhooks.Communicator) -> Tensor:
        raise NotImplementedError

    exchange = Exchange(run)  # of a step that has not succeeded yet
    with pytest.raises(
        commhooks.CommHookError, match="the exchange has not finished; await it first"
    ):
        exchange.result()
    exchange.future = NotAwaited()
    with pytest.raises(
        commhooks.CommHookError, match="the exchange has not finished; await it first"
    ):
        exchange.result()
    exchange.future.set_result(torch.tensor([2.0]))
    assert exchange.result().tolist() == [2.0]
