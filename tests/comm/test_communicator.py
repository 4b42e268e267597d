"""Collectives, each against its definition, and the bytes that they count."""

import gc
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks.comm import wire


@dataclass
class Everything(commhooks.CommHook):
    """Uses all collectives once, on small tensors, and keeps what came out."""

    results: dict[str, Any] = field(default_factory=dict, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        size, rank = comm.size, comm.rank
        own = torch.arange(6.0).view(2, 3) + 10 * rank
        parts = torch.arange(2.0 * size).view(size, 2) + 100 * rank
        sent: dict[str, int] = {}

        async def run(name: str, collective: Any) -> None:
            before = comm.wire_bytes
            self.results[name] = await collective
            sent[name] = comm.wire_bytes - before

        await run("sum", comm.all_reduce(own.clone()))
        await run("max", comm.all_reduce(own.clone(), op="max"))
        await run("gathered", comm.all_gather(own.T))
        await run("exchanged parts", comm.all_to_all(parts.clone()))
        await run("scattered", comm.reduce_scatter(parts.clone()))
        await run("broadcast", comm.broadcast(own.clone(), root=size - 1))
        await run("shifted", comm.sendrecv(own, (rank + 1) % size, (rank - 1) % size))
        sources = list(range(size)) if rank == 0 else []
        await run("pushed", comm.push(own, 0, sources))
        await run("nothing pushed", comm.push(own[:0], (rank + 1) % size, [(rank - 1) % size]))
        if (odd := [peer for peer in range(size) if peer % 2]) and rank in odd:
            await run("sum of odd ranks", comm.among(odd).all_reduce(own.clone()))
        await run("empty", comm.all_reduce(torch.empty(0)))
        await run("half", comm.all_reduce(own.bfloat16()))
        self.results["random"] = torch.rand(3, generator=comm.generator)
        self.results["sent"] = sent
        return bucket.buffer()


def run_everything(rank: int, size: int) -> list[dict[str, Any]]:
    torch.manual_seed(rank)
    hook = Everything()
    model = commhooks.DistributedDataParallel(nn.Linear(3, 2))
    commhooks.register(model, hook)
    results = []
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        results.append(dict(hook.results))
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective(run_ranks: Any, size: int) -> None:
    results = run_ranks(run_everything, size)
    own = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(size)]
    parts = [torch.arange(2.0 * size).view(size, 2) + 100 * rank for rank in range(size)]
    for rank, (found, second) in enumerate(results):
        expected = {
            "sum": torch.stack(own).sum(0),
            "max": own[-1],
            "gathered": torch.stack([tensor.T for tensor in own]),
            "exchanged parts": torch.stack([tensor[rank] for tensor in parts]),
            "scattered": torch.stack(parts).sum(0)[rank : rank + 1],
            "broadcast": own[-1],
            "shifted": own[rank - 1],
            "pushed": torch.stack(own) if rank == 0 else torch.empty(0, 2, 3),
            "nothing pushed": torch.empty(1, 0, 3),
            "empty": torch.empty(0),
            "half": torch.stack(own).sum(0).bfloat16(),
        }
        if rank % 2:
            expected["sum of odd ranks"] = torch.stack(own[1::2]).sum(0)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        assert torch.equal(found["random"], results[0][0]["random"])
        assert not torch.equal(found["random"], second["random"])
        part_bytes = 2 * 4
        odd_ranks = size // 2
        sent_by_odd = 2 * (odd_ranks - 1) * -(-24 // odd_ranks) if odd_ranks else 0
        assert found["sent"] == {
            "sum": 2 * (size - 1) * -(-24 // size),
            "max": 2 * (size - 1) * -(-24 // size),
            "gathered": (size - 1) * 24,
            "exchanged parts": (size - 1) * part_bytes,
            "scattered": (size - 1) * part_bytes,
            "broadcast": 24 if rank == size - 1 and size > 1 else 0,
            "shifted": 24 if size > 1 else 0,
            "pushed": 24 if rank > 0 else 0,
            "nothing pushed": 0,
            **({"sum of odd ranks": sent_by_odd} if rank % 2 else {}),
            "empty": 0,
            "half": 2 * (size - 1) * -(-12 // size),
        }


@pytest.fixture
def comm() -> Any:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield commhooks.Communicator(dist.group.WORLD, step=0, key="bucket")
    dist.destroy_process_group()


def test_bad_arguments(comm: commhooks.Communicator) -> None:
    strided = torch.ones(4, 4).T[1:3]
    for make, message in [
        (lambda: comm.all_reduce(torch.ones(2), op="mean"), "expected op in.*found 'mean'"),
        (lambda: comm.all_reduce(strided), r"all_reduce: expected a contiguous.*strides \(1, 4\)"),
        (lambda: comm.broadcast(strided), "broadcast: expected a contiguous"),
        (lambda: comm.all_to_all(torch.tensor(1.0)), "expected dimension 0"),
        (lambda: comm.broadcast(torch.ones(2), root=1), "root to be a rank of the group, 0 to 0"),
        (lambda: comm.sendrecv(torch.ones(2), -1, 0), "send_to to be a rank"),
        (lambda: comm.push(torch.ones(2), 0, [0, 1]), "receive_from to be a rank.*found 1"),
        (lambda: comm.push(torch.ones(2), 0, []), "sends to itself also receives from itself"),
        (lambda: comm.push(torch.ones(2), 0, [0, 0]), r"ascending order, found \[0, 0\]"),
        (lambda: comm.among([]), r"among: expected ranks.*0 among them, found \[\]"),
        (lambda: comm.among([0, 0]), r"ascending order.*found \[0, 0\]"),
        (lambda: comm.among([0, 1]), "each of them to be a rank"),
    ]:
        with pytest.raises(commhooks.CommHookError, match=message):
            make()


async def average(comm: commhooks.Communicator) -> Tensor:
    return await comm.all_reduce(torch.ones(2))


def test_an_exchange_has_the_ranks_of_its_communicator_and_the_groups_beside_it(
    comm: commhooks.Communicator,
) -> None:
    exchange = comm.among([0], parallel=4).begin(average)
    assert comm.begun == [exchange]
    coroutine = exchange.run()
    pending = coroutine.send(None)
    coroutine.close()
    assert (pending.operation, pending.members, pending.parallel) == ("all_reduce", (), 4)


def test_a_missing_await_warns(comm: commhooks.Communicator) -> None:
    with pytest.warns(RuntimeWarning, match=r"called comm\.all_reduce\(\) without `await`"):
        comm.all_reduce(torch.ones(2))


@dataclass
class Twice(commhooks.CommHook):
    async def reduce(self, bucket: Any, comm: Any) -> Any:
        pending = comm.all_reduce(bucket.buffer())
        await pending
        return await pending


def await_twice(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(torch.nn.Linear(2, 2))
    commhooks.register(model, Twice())
    with pytest.raises(commhooks.CommHookError, match="was awaited twice; keep its result"):
        model(torch.ones(1, 2)).sum().backward()


def test_a_collective_is_awaited_once(run_ranks: Any) -> None:
    run_ranks(await_twice, 2)


@dataclass
class Forgetful(commhooks.CommHook):
    async def reduce(self, bucket: Any, comm: Any) -> Any:
        return comm.all_reduce(bucket.buffer())


def forget(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(torch.nn.Linear(2, 2))
    commhooks.register(model, Forgetful())
    with pytest.raises(commhooks.CommHookError, match=r"returned comm\.all_reduce.*`await` it"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("size", [1, 2])
def test_an_awaitable_is_not_a_result(run_ranks: Any, size: int) -> None:
    run_ranks(forget, size)


@dataclass
class Interrupted(commhooks.CommHook):
    """Awaits one of two collectives on two ranks, and fails on the third one."""

    async def reduce(self, bucket: Any, comm: Any) -> Any:
        first, second = (comm.all_reduce(bucket.buffer().clone()) for _ in range(2))
        if comm.rank == 2:
            first.is_awaited = second.is_awaited = True
            raise ValueError("broken")
        await first
        return await second


def interrupt(rank: int, size: int) -> list[str]:
    model = commhooks.DistributedDataParallel(nn.Linear(2, 2))
    commhooks.register(model, Interrupted())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(commhooks.CommHookError, match="broken"):
            model(torch.ones(1, 2)).sum().backward()
        gc.collect()
    return [str(each.message) for each in caught]


def test_no_await_is_missing_in_a_hook_that_was_interrupted(run_ranks: Any) -> None:
    assert run_ranks(interrupt, 3) == [[]] * 3


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("nbytes", [0, 1, 24, 1000])
def test_wire_bytes(nbytes: int, size: int) -> None:
    part = -(-nbytes // size)
    assert wire.all_reduce_bytes(nbytes, size) == 2 * (size - 1) * part
    assert wire.reduce_scatter_bytes(nbytes, size) == wire.all_to_all_bytes(nbytes, size)
    assert wire.all_gather_bytes(nbytes, size) == (size - 1) * nbytes
    assert wire.broadcast_bytes(nbytes, size, is_root=False) == 0
