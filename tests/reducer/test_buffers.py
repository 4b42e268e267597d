"""When the buffers of a model are broadcast, and how hooks for buffers take over."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torchs_wrapper import without_unknown
from test_wrapper_options import WRAPPERS, inputs_of, make_net
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from commhooks.testing import run_ranks
from reducer import DistributedDataParallel


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_net()
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.counts += x.sum()
        return self.layers(x)


def buffer_values(rank: int, world_size: int, location: Any, returns_futures: bool) -> None:
    histories = []
    for wrapper in WRAPPERS:
        model = wrapper(Counting())
        calls: list[Any] = []

        def average(
            state: Any, buffers: dict[str, torch.Tensor], calls: list[Any] = calls
        ) -> list[Any] | None:
            calls.append((state, sorted(buffers)))
            futures = []
            for buffer in buffers.values():
                buffer.div_(world_size)
                futures.append(dist.all_reduce(buffer, async_op=True).get_future())
            if returns_futures:
                return futures
            torch.futures.wait_all(futures)
            return None

        model._register_buffer_comm_hook("state", average, location)
        history = []
        for step in range(3):
            model(inputs_of(rank, step)).sum().backward()
            history.append(model.module.counts.clone())
        with torch.no_grad():
            model(inputs_of(rank))
        histories.append((history, calls))
    (ours, our_calls), (theirs, their_calls) = histories
    assert our_calls == their_calls
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("location", "returns_futures"),
    [
        (_BufferCommHookLocation.PRE_FORWARD, False),
        (_BufferCommHookLocation.POST_FORWARD, False),
        (_BufferCommHookLocation.POST_FORWARD, True),
    ],
)
def test_buffer_hooks_behave_as_in_torch(location: Any, returns_futures: bool) -> None:
    run_ranks(buffer_values, 2, location, returns_futures)


def buffers_in_join(rank: int, world_size: int) -> list[float]:
    """#65436: torch's join and buffer hooks do not compose."""
    model = DistributedDataParallel(Counting())

    def largest(_: Any, buffers: dict[str, torch.Tensor]) -> None:
        for buffer in buffers.values():
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX)

    model._register_buffer_comm_hook(None, largest)
    with model.join():
        for step in range(1 + 2 * rank):
            model(torch.full((1, 6), float(rank + step))).sum().backward()
    return model.module.counts.tolist()


def test_buffer_hooks_compose_with_join() -> None:
    assert run_ranks(buffers_in_join, 2) == [[36.0] * 3] * 2


def versions(rank: int, world_size: int) -> None:
    """Two forwards, then one backward: the second broadcast must not invalidate the first graph."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.full((3,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * self.scale * x).sum()

    model = DistributedDataParallel(Scales())
    loss = model(torch.ones(3)) + model(torch.ones(3))
    loss.backward()
    assert model.module.weight.grad.tolist() == [4.0] * 3


def test_broadcast_buffers_between_two_forwards() -> None:
    run_ranks(versions, 2)


def buffers_as_torch(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Evaluation and accumulation change when buffers are broadcast."""
    histories = []
    for wrapper in WRAPPERS:
        torch.manual_seed(rank)
        model = wrapper(Counting(), **options)
        model.module.counts += 0.5 * rank
        history = []
        for kind in ("train", "eval", "eval", "train", "train", "no_sync", "no_sync", "train"):
            if kind == "eval":
                with torch.no_grad():
                    model(inputs_of(rank))
            elif kind == "no_sync":
                with model.no_sync():
                    model(inputs_of(rank)).sum().backward()
            else:
                model(inputs_of(rank)).sum().backward()
            history.append(model.module.counts.tolist())
        histories.append(history)
    assert histories[0] == histories[1]


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
@pytest.mark.parametrize(
    "options", [{}, {"broadcast_buffers": False}, {"forward_sync_buffers": False}]
)
def test_buffers_are_broadcast_when_torch_does(options: dict[str, Any]) -> None:
    run_ranks(buffers_as_torch, 2, without_unknown(options))


def sync_batch_norm(rank: int, world_size: int) -> None:
    for wrapper in WRAPPERS:
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            wrapper(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


def test_sync_batch_norm_raises_on_the_cpu() -> None:
    run_ranks(sync_batch_norm, 1)


def buffers_to_sync(rank: int, world_size: int) -> None:
    of_wrappers = []
    for wrapper in WRAPPERS:
        model = wrapper(Counting())
        found = [(model.require_forward_param_sync, model.will_sync_module_buffers())]
        for synchronizes in (True, False, False, True):
            with contextlib.nullcontext() if synchronizes else model.no_sync():
                model(inputs_of(rank)).sum().backward()
            found.append((model.require_forward_param_sync, model.will_sync_module_buffers()))
        model.require_forward_param_sync = False  # as users do to keep buffers apart once
        model.module.counts.fill_(rank)
        model(torch.zeros(1, 6)).sum().backward()
        found.append(model.module.counts.tolist())
        found.append(wrapper(make_net()).will_sync_module_buffers())
        of_wrappers.append(found)
    ours, theirs = of_wrappers
    assert ours == theirs
    assert ours[-2:] == [[rank] * 3, False]


def test_buffers_are_announced_as_in_torch() -> None:
    run_ranks(buffers_to_sync, 2)
