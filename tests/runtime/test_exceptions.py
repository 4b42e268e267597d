"""Hooks that raise SystemExit and the like: Note [Exceptions that are not errors]."""

import asyncio
import itertools
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks


class Peculiar(BaseException):
    """Cannot be copied."""

    def __init__(self, *, text: str) -> None:
        super().__init__(text)


RAISED = {
    "exit": (SystemExit(3), "SystemExit: 3"),
    "interrupt": (KeyboardInterrupt("ctrl-c"), "KeyboardInterrupt: ctrl-c"),
    "cancel": (asyncio.CancelledError(), "CancelledError: "),
    "fail": (pytest.fail.Exception("wrong"), "Failed: wrong"),
    "peculiar": (Peculiar(text="own"), "Peculiar: own"),
}
PLACES = ("first", "later", "finally", "recover")


@dataclass
class Raising(commhooks.CommHook):
    """The exact average, until it is told where to raise what."""

    place: str = field(default="", init=False, compare=False)
    what: str = field(default="", init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self._raise("first")
        try:
            average = (await comm.all_reduce(bucket.buffer())).div_(comm.size)
            if bucket.index() == 1:
                self._raise("later")
            await comm.all_reduce(torch.ones(1))
        finally:
            if self.place == "finally":
                raise RAISED[self.what][0]
        return average

    def recover(self) -> None:
        self._raise("recover")

    def _raise(self, place: str) -> None:
        if self.place == place:
            raise RAISED[self.what][0]


def backward(model: nn.Module, rank: int) -> str:
    """Return the outcome of a step."""
    model.zero_grad()
    try:
        model(torch.full((1, 2), float(rank))).sum().backward()
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        return f"{type(error).__name__}|{error}|{notes}"
    assert torch.equal(model.module[0].weight.grad, torch.full((1, 2), 1.0))
    return "average"


def raise_everything(rank: int, size: int, torch_ddp: bool) -> list[tuple[str, str, list[str]]]:
    wrapper = TorchDistributedDataParallel if torch_ddp else commhooks.DistributedDataParallel
    module = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.ones_(module[1].weight)
    model = wrapper(module, bucket_cap_mb=1e-6)
    hook = Raising()
    commhooks.register(model, hook)
    results = []
    for what, place in itertools.product(RAISED, PLACES):
        outcomes = []
        if place == "recover":  # runs after a step has failed
            hook.place, hook.what = ("first", "fail") if rank == 1 else ("", "")
            backward(model, rank)
        hook.place, hook.what = (place, what) if rank == 1 else ("", "")
        outcomes.append(backward(model, rank))
        hook.place = ""
        outcomes.append(backward(model, rank))
        results.append((what, place, outcomes))
    return results


@pytest.mark.parametrize("torch_ddp", [False, True])
def test_whatever_a_hook_raises_ends_the_step_on_all_ranks(run_ranks: Any, torch_ddp: bool) -> None:
    """Here rank 1 raises; the last rank learns of it like rank 0."""
    of_ranks = run_ranks(raise_everything, 3, torch_ddp)
    for rank, results in enumerate(of_ranks):
        assert len(results) == len(RAISED) * len(PLACES)
        for what, place, (failed, after) in results:
            exception, quoted = RAISED[what]
            name, text, notes = failed.split("|")
            assert after == "average"
            if rank != 1:
                assert name == "CommHookPeerError"
                assert quoted in text
                assert "[rank 1]" in text
            elif what == "peculiar":
                assert name == "CommHookError"
                assert quoted in text
            else:
                assert name == type(exception).__name__
                assert text == str(exception)
                assert quoted in notes, (place, notes)
                assert "hook Raising(" in notes


@dataclass
class Unready(commhooks.CommHook):
    """Exits on rank 1 while it is registered."""

    def prepare(self, parameters: Any, group: Any) -> None:
        if group.rank() == 1:
            raise SystemExit(3)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        return bucket.buffer()


def register_unready(rank: int, size: int) -> str:
    model = commhooks.DistributedDataParallel(nn.Linear(2, 1))
    try:
        commhooks.register(model, Unready())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "registered"


def test_an_exit_in_prepare_ends_the_registration_on_all_ranks(run_ranks: Any) -> None:
    other, exited = run_ranks(register_unready, 2)
    assert exited == "SystemExit: 3"
    assert other.startswith("CommHookMismatchError")
    assert exited in other


def leave(rank: int, size: int) -> int:
    """SystemExit passes `except Exception` of a training loop, with its code."""
    model = commhooks.DistributedDataParallel(nn.Linear(2, 1))
    hook = Raising()
    commhooks.register(model, hook)
    hook.place, hook.what = "first", "exit"
    try:
        model(torch.ones(1, 2)).sum().backward()
    except Exception as error:
        raise AssertionError("an Exception") from error
    except SystemExit as error:
        return int(str(error.code))
    raise AssertionError("no error")


@pytest.mark.parametrize("size", [1, 2])
def test_system_exit_keeps_its_code(run_ranks: Any, size: int) -> None:
    assert run_ranks(leave, size) == [3] * size


def thread_of_hook(rank: int, size: int) -> bool:
    """Return whether the hook runs on the thread of backward."""
    found = []

    @dataclass
    class Named(commhooks.CommHook):
        async def reduce(
            self, bucket: commhooks.GradBucket, comm: commhooks.Communicator
        ) -> Tensor:
            found.append(threading.current_thread())
            return await comm.all_reduce(bucket.buffer())

    model = commhooks.DistributedDataParallel(nn.Linear(2, 2))
    commhooks.register(model, Named())
    model(torch.ones(1, 2)).sum().backward()
    return found == [threading.current_thread()]


def test_one_rank_needs_no_thread(run_ranks: Any) -> None:
    assert run_ranks(thread_of_hook, 1) == [True]
    assert run_ranks(thread_of_hook, 2) == [False] * 2


@dataclass
class OneMoreOnRank0(commhooks.CommHook):
    """Rank 0 awaits a collective for which the others do not come, if told so."""

    is_told: bool = field(default=False, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        average = (await comm.all_reduce(bucket.buffer())).div_(comm.size)
        if self.is_told and comm.rank == 0:
            await comm.all_reduce(torch.ones(1))
        return average


def wait_for_peers(rank: int, size: int) -> list[str]:
    module = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.ones_(module[1].weight)
    model = commhooks.DistributedDataParallel(module, bucket_cap_mb=1e-6)
    hook = OneMoreOnRank0()
    handle = commhooks.register(model, hook)
    outcomes = [backward(model, rank)]
    usual = change_timeout(handle, timedelta(seconds=0.4) if rank == 0 else None)
    hook.is_told = True
    outcomes.append(backward(model, rank))
    change_timeout(handle, usual)
    hook.is_told = False
    outcomes += [backward(model, rank) for _ in range(2)]
    return outcomes


def change_timeout(handle: commhooks.HookHandle, timeout: timedelta | None) -> timedelta:
    groups: Any = handle._adapter._runner._steps.groups
    before: timedelta = groups._timeout
    groups._timeout = timeout or before
    return before


def test_a_collective_of_some_ranks_only_names_the_others(run_ranks: Any) -> None:
    of_ranks = run_ranks(wait_for_peers, 3)
    for outcomes in of_ranks:
        assert outcomes[:1] + outcomes[2:] == ["average"] * 3
        name, text, _ = outcomes[1].split("|")
        assert name == "CommHookPeerError"
        assert "[rank 0] ranks [1, 2] did not come to collective 1 of a hook within 0 s" in text
        assert "do all ranks run the same number of steps, with the same collectives" in text
