"""Hooks and runners keep Note [Streams and lifetimes] in side_stream.py, on a simulated device."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from emulation import emulated
from support.conforming_hooks import OPTIONS, OWN_HOOKS
from support.simulated_streams import Simulation, simulated
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.adapters import adapter
from commhooks.adapters.adapter import make_runner
from commhooks.adapters.ddp import DDPAdapter
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, tree
from commhooks.runtime.stream_runner import StreamRunner
from commhooks.runtime.threaded_runner import ThreadedRunner
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

RUNNERS = {"stream": StreamRunner, "threaded": ThreadedRunner}
WRAPPERS = {"ours": commhooks.DistributedDataParallel, "torch's": TorchDistributedDataParallel}
Found = tuple[list[str], set[str]]
"""Problems, and the calls that order streams."""
# One of each family; the others run in `make test-all`.
FAMILIES = {"demo", "diloco", "guard", "int8", "powersgd", "push_sum", "skip_nonfinite", "topk"}
WITH_EXCHANGES = {"period": 2, "delay": 1, "inner": "int8"}


@contextmanager
def device(runner: str, ignored: str = "") -> Iterator[Simulation]:
    """Run hooks by ``runner`` on a simulated device, also those that have a version in C++."""
    adapter.make_runner = RUNNERS[runner]  # type: ignore[assignment]
    try:
        with emulated(), simulated(ignored) as simulation:
            yield simulation
    finally:
        adapter.make_runner = make_runner


def make(name: str, options: dict[str, Any]) -> CommHook:
    hook: Any = commhooks.create(name, **options)
    hook.native = lambda group, step=None: None
    return hook


def train(trainer: Trainer, rank: int, simulation: Simulation, *steps: int) -> None:
    for step in steps:
        found = trainer.step(draw_gradients(probe_parameters(), rank, step))
        simulation.unpack()
        with torch.no_grad():
            for name, gradient in found.items():
                trainer.parameters[name].sub_(gradient)


def life(
    rank: int,
    size: int,
    runner: str,
    name: str,
    options: dict[str, Any],
    ignored: str = "",
    *,
    torch_ddp: bool = False,
) -> Found:
    """Use a hook in every way that touches what it keeps."""
    with device(runner, ignored) as simulation:
        wrapper = {"torch_ddp": True} if torch_ddp else {"stable_buckets": True}
        trainer = Trainer(make(name, options), **wrapper)
        handle = trainer.handle
        train(trainer, rank, simulation, 0, 1, 2)
        saved = copied(handle.state_dict())  # in the middle of an exchange
        train(trainer, rank, simulation, 3)
        handle.load_state_dict(copied(saved))
        train(trainer, rank, simulation, 4, 5, 6)
        has_exchanges = any(each.has_exchanges for each in tree(trainer.hook))
        if not has_exchanges:  # the new runner would not know them
            handle.replace(handle.hook)
        train(trainer, rank, simulation, 7, 8)
        if isinstance(handle.adapter, DDPAdapter):
            assert handle.adapter._registration.on_overwrite is not None
            handle.adapter._registration.on_overwrite()  # which calls recover()
        train(trainer, rank, simulation, 9, 10)
        handle.stats()
        handle.replace(make(name, options))
        train(trainer, rank, simulation, 11, 12)
        handle.remove()
        del trainer, handle
    return list(simulation.problems), simulation.calls


def failure(rank: int, size: int, runner: str, ignored: str = "") -> Found:
    """Drop a model, or remove the hook, after a step, in which the hook has failed or not."""
    with device(runner, ignored) as simulation:
        train(Trainer(make("int8", {}), stable_buckets=True), rank, simulation, 0)
        fail(rank, simulation, "int8")
        fail(rank, simulation, "local_sgd", period=1)  # writes to the parameters
        if runner == "threaded":  # on NCCL the hook keeps failing
            fail(rank, simulation, "local_sgd", period=1).handle.remove()  # averages the models
    return list(simulation.problems), simulation.calls


def train_shards(model: Any, optimizer: Any, rank: int, *steps: int) -> None:
    for step in steps:
        model(torch.full((3, 20), float(rank + step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def shards(
    rank: int, size: int, runner: str, name: str, options: dict[str, Any], ignored: str = ""
) -> Found:
    """As :func:`life`, between the replicas of a sharded model."""
    with device(runner, ignored) as simulation:
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 10))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        handle = commhooks.register(model, make(name, options))
        optimizer = torch.optim.SGD(model.parameters())

        steps = functools.partial(train_shards, model, optimizer, rank)
        steps(0, 1, 2)
        saved = copied(handle.state_dict())
        steps(3)
        handle.load_state_dict(saved)
        steps(4, 5)
        handle.replace(handle.hook)
        steps(6)
        handle.replace(make(name, options))
        steps(7, 8)
        handle.remove()
        del model, handle, optimizer, steps, module
    return list(simulation.problems), simulation.calls


class Words(nn.Module):
    """Has a sparse gradient beside dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words)).square().sum()


def rows(rank: int, size: int, runner: str, wrapper: str) -> Found:
    """Train with sparse gradients, which no hook gets."""
    with device(runner) as simulation, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of sparse gradients, at registration
        model = WRAPPERS[wrapper](Words())
        handle = commhooks.register(model, make("int8", {}))
        for step in range(4):
            model(torch.tensor([rank, 3, step])).backward()
            simulation.unpack()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad.to_dense(), alpha=0.1)
                    parameter.grad = None
        handle.remove()
        del model, handle, parameter
    return list(simulation.problems), simulation.calls


def fail(rank: int, simulation: Simulation, name: str, **options: Any) -> Trainer:
    hook: Any = make(name, options)
    trainer = Trainer(hook, stable_buckets=True)
    train(trainer, rank, simulation, 0)
    reduce = hook.reduce

    async def fail_late(bucket: Any, comm: Any) -> Tensor:
        if bucket.index() == 0:
            return await reduce(bucket, comm)
        bucket.buffer().zero_()
        raise ValueError("raised by the test")

    hook.reduce = fail_late
    with suppress(CommHookError):
        train(trainer, rank, simulation, 1)
    simulation.launched.clear()  # backward has raised, and waits for no bucket
    return trainer


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    ("runner", "name", "options"),
    [
        pytest.param(
            runner,
            name,
            options,
            marks=[pytest.mark.exhaustive]
            if index or name not in FAMILIES or runner == "threaded"
            else [],
        )
        for runner in RUNNERS
        for name in OWN_HOOKS
        for index, options in enumerate(OPTIONS.get(name, [{}]))
    ],
)
def test_nothing_is_used_too_early_or_freed_too_soon(run_ranks, runner, name, options):
    for problems, _ in run_ranks(life, 2, runner, name, options):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("runner", "name", "options"),
    [
        pytest.param(
            runner, name, options, marks=[pytest.mark.exhaustive] if runner == "threaded" else []
        )
        for runner in RUNNERS
        for name, options in (
            ("int8", {}),
            ("powersgd", OPTIONS["powersgd"][0]),
            ("diloco", WITH_EXCHANGES),
        )
    ],
)
def test_nor_in_torchs_wrapper(run_ranks, runner, name, options):
    for problems, _ in run_ranks(life, 2, runner, name, options, torch_ddp=True):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("runner", "name"),
    [
        ("stream", "int8"),
        pytest.param("threaded", "int8", marks=[pytest.mark.exhaustive]),
        pytest.param("stream", "powersgd", marks=[pytest.mark.exhaustive]),
    ],
)
def test_nor_between_replicas_of_shards(run_ranks, runner, name):
    for problems, _ in run_ranks(shards, 2, runner, name, OPTIONS.get(name, [{}])[0]):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nor_with_sparse_gradients(run_ranks, runner, wrapper):
    for problems, calls in run_ranks(rows, 2, runner, wrapper):
        assert not problems, "\n".join(problems)
        assert calls


@pytest.mark.parametrize("runner", RUNNERS)
def test_nor_after_a_failure(run_ranks, runner):
    for problems, _ in run_ranks(failure, 2, runner):
        assert not problems, "\n".join(problems)


# What orders streams or records one: the functions of side_stream.py, and what calls them.
CALLS = {
    "stream": {
        "record: follow < StreamRunner.__call__",
        "record: record_on_current_stream < HookHandle.state_dict",
        "record: record_on_current_stream < Runner._record_states",
        "wait: follow < StreamRunner.__call__",
        "wait: follow < StreamRunner._run_exchanges",
        "wait: follow < forked < Runner.between_steps",
        "wait: join < StreamRunner.drain",
        "wait: join < forked < Runner.between_steps",
    },
    "threaded": {
        "record: follow < StepScheduler.launch",
        "record: record_on_current_stream < HookHandle.state_dict",
        "record: record_on_current_stream < Runner._record_states",
        "wait: follow < StepScheduler.launch",
        "wait: follow < forked < Runner.between_steps",
        "wait: join < forked < Runner.between_steps",
    },
}


def found_without(run_ranks: Any, runner: str, ignored: str) -> tuple[list[str], set[str]]:
    """Return problems, if any, and the calls up to there, if one call has no effect."""
    calls: set[str] = set()
    for function, *args in (
        (failure,),
        (life, "diloco", WITH_EXCHANGES),
        (life, "push_sum", {}),
    ):
        for problems, found in run_ranks(function, 2, runner, *args, ignored):
            calls |= found
            if problems:
                return problems, calls
    return [], calls


@pytest.mark.parametrize(
    ("runner", "call"),
    [
        pytest.param(runner, call, marks=[pytest.mark.exhaustive] if runner == "threaded" else [])
        for runner in CALLS
        for call in sorted(CALLS[runner])
    ],
)
def test_each_call_is_needed(run_ranks, runner, call):
    assert found_without(run_ranks, runner, call)[0]


@pytest.mark.parametrize("runner", RUNNERS)
def test_these_are_all_calls(run_ranks, runner):
    problems, calls = found_without(run_ranks, runner, "")
    assert not problems
    assert calls == CALLS[runner]
