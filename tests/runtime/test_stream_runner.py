"""The runner of backends that keep the order of collectives, tested on Gloo."""

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

import commhooks
from commhooks.adapters import adapter
from commhooks.comm.private_groups import PrivateGroups
from commhooks.hook.spec import hook_spec
from commhooks.runtime import side_stream, stream_runner, threaded_runner
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stream_runner import StreamRunner

CPU = torch.device("cpu")
on_an_ordered_backend = patch.object(adapter, "ThreadedRunner", StreamRunner)

# They multiply matrices, which autocast does in half precision.
MULTIPLYING: list[dict[str, Any]] = [
    {"name": "demo"},
    {"name": "powersgd", "num_iters_per_step": 2, "start_step": 0, "min_compression_rate": 1.0},
]


class Product(nn.Module):
    """Its own backward multiplies no matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@on_an_ordered_backend
def averages(rank: int, size: int, config: dict[str, Any], autocast: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = commhooks.DistributedDataParallel(Product())
    commhooks.register(model, config)
    found = []
    for step in range(3):
        model.zero_grad()
        loss = model(torch.randn(32, 64, generator=torch.Generator().manual_seed(step))).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            (loss * (rank + 1)).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


@pytest.mark.parametrize("config", MULTIPLYING, ids=lambda config: config["name"])
def test_hooks_do_not_see_the_autocast_of_backward(run_ranks: Any, config: dict[str, Any]) -> None:
    plain = run_ranks(averages, 2, config, False)
    cast = run_ranks(averages, 2, config, True)
    for expected, found in zip(plain, cast, strict=True):
        assert all(map(torch.equal, expected, found))


class FakeStream:
    """A stream that may be entered by one thread at a time, as torch's in 2.11."""

    def __init__(self, *_: object, **kwargs: Any) -> None:
        self.stream_id, self.device_index, self.device_type = 7, 0, 1
        self.is_entered = False

    def __enter__(self) -> None:
        assert not self.is_entered
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        self.is_entered = False

    def record_event(self) -> "FakeStream":
        return self


def test_threads_enter_one_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_stream, "torch", SimpleNamespace(Stream=FakeStream))
    stream = SideStream(torch.device("cuda", 0))
    failures: list[BaseException] = []

    def enter() -> None:
        try:
            with stream:
                pass
        except BaseException as error:
            failures.append(error)

    with stream:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert not failures


def test_draining_waits_for_steps_and_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a saved state would be copied while the exchange stream writes it."""
    awaited: list[FakeStream] = []
    current = SimpleNamespace(wait_event=awaited.append)
    fake = SimpleNamespace(
        Stream=FakeStream, accelerator=SimpleNamespace(current_stream=lambda _: current)
    )
    monkeypatch.setattr(side_stream, "torch", fake)
    drained = object.__new__(StreamRunner)
    drained._stream, drained._exchange_stream = (
        SideStream(torch.device("cuda", 0)) for _ in range(2)
    )
    drained._failure = None
    drained.drain()
    assert awaited == [drained._stream._stream, drained._exchange_stream._stream]


# ------------------------------------------------------------------- order on the model's group


class Branches(nn.Module):
    """Has buffers, and a parameter that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        used = self.layers[: 2 + dist.get_rank() % 2]
        return nn.Sequential(self.norm, *used)(x)


@on_an_ordered_backend
def collectives_of_steps(rank: int, size: int) -> tuple[list[str], list[Tensor]]:
    """Return the collectives of three steps of two models, in the order in which they begin."""
    torch.manual_seed(0)
    models = [
        commhooks.DistributedDataParallel(
            Branches(), find_unused_parameters=True, bucket_cap_mb=1e-4
        )
        for _ in range(2)
    ]
    commhooks.register(models[0], "int8")
    commhooks.register(models[1], "powersgd", rank=1, start_step=0, min_compression_rate=1.0)
    with (
        patch.object(stream_runner, "PrivateGroups", side_effect=AssertionError),
        profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            acc_events=True,  # without which torch 2.11 warns
        ) as recorded,
    ):
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(size * step + rank))
            sum(model(x).sum() for model in models).backward()
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    found = [f"{e.name} {e.input_shapes}" for e in events if e.name.startswith("c10d::")]
    return found, [parameter.grad for model in models for parameter in model.parameters()]


def test_collectives_have_one_order_on_the_models_group(run_ranks: Any) -> None:
    """Of hooks, and of the wrapper: buffers before them, and which parameters were used after."""
    (first, gradients), *others = run_ranks(collectives_of_steps, 3)
    for found, other_gradients in others:
        assert found == first
        assert all(map(torch.equal, gradients, other_gradients))
    kinds = [text.partition(" ")[0].removeprefix("c10d::").rstrip("_") for text in first]
    assert kinds[0] == "broadcast"
    assert kinds[-1] == "allreduce"
    assert {"broadcast", "allreduce", "alltoall_base", "_allgather_base"} <= set(kinds)


# --------------------------------------------------------------- communicators of a hook's own


@on_an_ordered_backend
def registered_hooks_connect(rank: int, size: int, config: dict[str, Any]) -> list[str]:
    """Return what a hook connects when it is registered; afterwards it connects nothing."""
    connect, connected = PrivateGroups._make_group, []

    def record(groups: PrivateGroups, store: Any, ranks: tuple[int, ...]) -> Any:
        connected.append(f"{groups._purpose} of {len(ranks)}")
        return connect(groups, store, ranks)

    model = commhooks.DistributedDataParallel(nn.Linear(8, 8))
    with patch.object(PrivateGroups, "_make_group", record):
        handle = commhooks.register(model, config)
    with patch.object(PrivateGroups, "_make_group", side_effect=AssertionError):
        for _ in range(5):
            model(torch.full((2, 8), rank + 1.0)).sum().backward()
    handle.remove()
    return connected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "int8"}, []),
        ({"name": "topk", "density": 0.5}, []),
        ({"name": "hierarchical", "inner": "int8", "ranks_per_node": 2}, ["steps of 2"] * 2),
        ({"name": "diloco", "period": 2}, []),
        ({"name": "diloco", "period": 2, "delay": 1}, ["exchanges of 4"]),
    ],
    ids=str,
)
def test_hooks_connect_what_they_need_when_registered(
    run_ranks: Any, config: dict[str, Any], expected: list[str]
) -> None:
    assert run_ranks(registered_hooks_connect, 4, config) == [expected] * 4


# ------------------------------------------------------------------------------------ failures


@dataclass
class Fragile(commhooks.CommHook):
    """Raises on one rank before its second collective, if it is told so."""

    breaks: bool = False

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        wire = await comm.all_reduce(bucket.buffer())
        if self.breaks and comm.rank == 1:
            raise ValueError("broken between two collectives")
        return (await comm.all_reduce(wire)).div_(comm.size**2)


@on_an_ordered_backend
def fail_on_one_rank(rank: int, size: int) -> list[str]:
    model = commhooks.DistributedDataParallel(nn.Linear(8, 8), stable_buckets=True)
    hook = Fragile()
    handle = commhooks.register(model, hook)
    x = torch.full((2, 8), rank + 1.0)
    model(x).sum().backward()
    assert torch.all(model.module.bias.grad == 2.0)
    hook.breaks = True
    messages: list[str] = []

    def backward() -> None:
        model(x).sum().backward()

    if rank == 0:
        backward()  # waits for the other rank
        return messages
    for call in (backward, backward, lambda: handle.replace("allreduce"), handle.state_dict):
        with pytest.raises(commhooks.CommHookError) as caught:
            call()
        messages.append(f"{caught.type.__name__}: {caught.value}")
    dist.all_reduce(torch.zeros(72))  # what it owes, so that the other rank can end here
    return messages


def test_a_failure_lasts_until_the_restart(run_ranks: Any) -> None:
    """A rank that went on would send numbers of its next step where peers expect the failed one."""
    _, failing = run_ranks(fail_on_one_rank, 2)
    assert failing[0].startswith("CommHookError: [rank 1] hook Fragile")
    assert len(failing) == 4
    for message in failing[1:]:
        assert message.startswith("CommHookError: [rank 1] the hook failed in an earlier step")
        assert "ValueError: broken between two collectives" in message
        assert "restart all ranks" in message


@dataclass
class Noting(commhooks.CommHook):
    """Begins an exchange on each bucket, and notes what is called."""

    breaks: bool = False

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.begun: list[Any] = []

    def recover(self) -> None:
        self.notes.append("recover")
        self.begun.clear()

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.notes.append(f"reduce {bucket.index()}")
        if self.breaks:
            raise ValueError("broken")
        average = (await comm.all_reduce(bucket.buffer())).div_(comm.size)

        async def exchange(comm: commhooks.Communicator) -> Tensor:
            self.notes.append(f"exchange {bucket.index()}")
            return await comm.all_reduce(average.clone())

        self.begun.append(comm.begin(exchange))
        return average


FOUR = [f"reduce {index}" for index in range(4)] + [f"exchange {index}" for index in range(4)]


def fail_and_go_on(rank: int, size: int, in_hook: bool) -> list[str]:
    """Return what is called in a step that fails, in the hook or in backward, and in the next."""
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    model = commhooks.DistributedDataParallel(net, bucket_cap_mb=1e-6, stable_buckets=True)
    hook = Noting()
    with on_an_ordered_backend:
        commhooks.register(model, hook)
    x = torch.ones(1, 4)
    model(x).sum().backward()
    assert hook.notes == FOUR
    hook.notes.clear()
    hook.breaks = in_hook
    loss = model(x).sum()
    breaking = net[1].weight.register_hook(lambda _: None if in_hook else 1 // 0)
    with pytest.raises(commhooks.CommHookError if in_hook else ZeroDivisionError):
        loss.backward()
    breaking.remove()
    hook.breaks = False
    model(x).sum().backward()
    assert len(hook.begun) == 4
    return hook.notes


def test_a_backward_that_fails_outside_the_hook_is_a_failed_step(run_ranks: Any) -> None:
    """Its exchanges began with those of the next step, and the hook did not recover."""
    for size in (1, 2):
        for notes in run_ranks(fail_and_go_on, size, False):
            assert notes == ["reduce 0", "reduce 1", "recover", *FOUR]


def test_a_hook_recovers_when_the_next_step_begins(run_ranks: Any) -> None:
    """With one rank it did in the middle of the failed step, and the other buckets ran."""
    (notes,) = run_ranks(fail_and_go_on, 1, True)
    assert notes == ["reduce 0", "recover", *FOUR]


# ------------------------------------------------------------------------------------- capture

CAPTURABLE_FROM = {
    "allreduce": 0,
    "cast:inner=bf16": 0,
    "cast:inner=qsgd": None,
    "int8": 0,
    "int8:stochastic=true": None,
    "topk:warmup_steps=7": 7,
    "powersgd:start_step=3": 3,
    "powersgd:two_sided=false": None,
    'route:rules=[["*bias",{"name":"topk","warmup_steps":5}]],default=int8': 5,
    "local_sgd": None,
}


@pytest.mark.parametrize("hook", CAPTURABLE_FROM)
def test_a_graph_captures_hooks_that_declare_it(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    created, first = hook_spec(hook).create(), CAPTURABLE_FROM[hook]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert dist.group.WORLD is not None
    try:
        runner = StreamRunner(created, dist.group.WORLD, CPU, 0)
        assert runner.capturable_from() == first
        assert not runner.is_captured(100)
        runner._device = torch.device("cuda", 0)
        kind = type(created).__name__
        if first is None:
            with pytest.raises(commhooks.CommHookError, match=f"cannot capture hook {kind}"):
                runner.is_captured(100)
            return
        with pytest.raises(commhooks.CommHookError, match=f"step 100 .*expected step {first} or"):
            runner.is_captured(100)  # nothing has run, so there is no state yet
        monkeypatch.setattr(runner, "has_run", lambda: True)
        assert runner.is_captured(first)
        if first > 0:
            with pytest.raises(commhooks.CommHookError, match=f"step {first - 1} "):
                runner.is_captured(first - 1)
    finally:
        dist.destroy_process_group()


def ask_while_capturing(rank: int, size: int, wrapper: type[nn.Module], is_ordered: bool) -> str:
    kind = StreamRunner if is_ordered else threaded_runner.ThreadedRunner
    model = wrapper(nn.Linear(8, 8))
    with patch.object(adapter, "ThreadedRunner", kind):
        handle = commhooks.register(model, "qsgd")
    handle.adapter._runner._device = torch.device("cuda", 0)
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        if wrapper is TorchDDP:
            loss = model(torch.ones(2, 8)).sum()
            with pytest.raises(commhooks.CommHookError) as caught:
                loss.backward()
        else:  # before anything is enqueued on a stream that has to be joined
            with pytest.raises(commhooks.CommHookError) as caught:
                model(torch.ones(2, 8))
    return str(caught.value)


@pytest.mark.parametrize("wrapper", [commhooks.DistributedDataParallel, TorchDDP])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_runners_ask_before_they_run_a_hook(
    run_ranks: Any, wrapper: type[nn.Module], is_ordered: bool
) -> None:
    for message in run_ranks(ask_while_capturing, 2, wrapper, is_ordered):
        assert "a CUDA graph cannot capture hook QSGD" in message
