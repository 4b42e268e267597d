"""Threads beside training: Note [Locks and the GIL] and Note [The turn] in csrc."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.futures import Future

import commhooks
import commhooks._C
import reducer._C
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel, GradBucket
from reducer.native import AverageHook

STEPS = 200


def make_model(layers: int = 4, **options: Any) -> nn.Module:
    """One bucket per parameter, unless ``options`` say otherwise."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    return DistributedDataParallel(module, **{"bucket_cap_mb": 1e-6, **options})


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 4)).sum().backward()


# ------------------------------------------------------------------------------------- the rules


@contextmanager
def reading(*readers: Callable[[], object]) -> Iterator[None]:
    """Call each reader in a loop, on a thread of its own.

    With pauses: on idle cores, threads that do not wait could keep the GIL from others for minutes.
    """
    is_over, failures = threading.Event(), []

    def read(reader: Callable[[], object]) -> None:
        try:
            while not is_over.wait(1e-5):
                reader()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


def read_while_training(rank: int, world_size: int) -> None:
    """Buckets are rebuilt again and again, and hooks replaced, while two threads read."""
    model = make_model()
    handle = commhooks.register(model, "int8")

    def read_one() -> None:
        handle.stats()
        assert 0 <= model.reducer.steps <= STEPS

    def read_all() -> None:
        for row in model.reducer.bucket_stats():  # of whole steps
            assert row["packed_bytes"] == row["steps"] * row["gradient_bytes"]
        model.reducer.last_times()
        assert len(model.reducer.skipped_buckets) == 8

    with reading(read_one, read_all):
        for step in range(STEPS):
            if step % 10 == 0:
                model._update_process_group(model.process_group)  # rebuilds buckets in a step
                handle.replace("int8")
            backward(model)
    assert model.reducer.steps == STEPS


def test_two_threads_read_while_another_one_trains() -> None:
    run_ranks(read_while_training, 1, timeout=240)  # AddressSanitizer takes 60 s and more


class Spy:
    """Reads from the reducer when it dies, which takes the reducer's lock."""

    def __init__(self, reducer: Any, dead: list[str], name: str) -> None:
        self.reducer, self.dead, self.name = weakref.ref(reducer), dead, name

    def __del__(self) -> None:
        if (alive := self.reducer()) is not None:
            alive.steps  # noqa: B018
            self.dead.append(self.name)


def let_things_die(rank: int, world_size: int) -> list[str]:
    """Each thing is owned by the reducer alone when it is replaced or the step ends."""
    dead: list[str] = []
    model = make_model()
    engine = model.reducer

    def spy(name: str) -> Any:
        return Spy(engine, dead, name)

    def hook_of(buffers: Any, own: Any) -> Any:
        def hook(bucket: GradBucket) -> Future[torch.Tensor]:
            buffer = bucket.buffer()
            buffer.spy = spy(buffers)
            result: Future[torch.Tensor] = Future()
            result.set_result(buffer)
            return result

        hook.spy = own  # type: ignore[attr-defined]
        return hook

    def observer(indices: Any, own: Any = spy("observer")) -> None: ...  # noqa: B008

    def future_of(value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(value)
        return future

    engine.set_hook(hook_of("buffer", spy("hook")))
    engine.set_observer(observer)
    del observer
    backward(model)
    engine.set_observer(None)
    engine.await_after_backward([future_of(spy("awaited"))])
    backward(model)  # rebuilds the buckets first
    engine.await_after_backward([future_of(spy("aborted"))])
    model(torch.ones(1, 4))
    engine.abort()
    engine.set_keys(range(8))
    engine.set_hook(AverageHook(model.process_group))
    return dead


def test_what_dies_may_ask_for_the_lock() -> None:
    for dead in run_ranks(let_things_die, 1, timeout=20):
        assert set(dead) == {"hook", "buffer", "observer", "awaited", "aborted"}
        assert dead.count("buffer") == 3 * 8 - 8  # those of the last step are set_keys' old buckets


def call_everything(rank: int, world_size: int) -> tuple[set[str], int, int]:
    """Call every method and property of the reducer; return those left out."""
    model = make_model(2)
    engine = model.reducer
    commhooks.register(model, "int8")
    engine.start_recording()
    backward(model)
    engine.set_manual_finalization(True)
    backward(model)
    engine.finalize_backward()
    arguments: dict[str, tuple[Any, ...]] = {
        "await_after_backward": ([],),
        "match_backward": (engine.skipped_buckets,),
        "begin_step": ([],),
        "prepare_for_backward": ([],),
        "set_hook": (AverageHook(model.process_group),),
        "set_keys": ([0] * 4,),
        "set_manual_finalization": (False,),
        "set_observer": (None,),
        "set_process_group": (model.process_group,),
    }
    names = [name for name in dir(engine) if not name.startswith("_")]
    names.remove("set_static_graph")  # only before the first step
    for name in names:
        member = getattr(engine, name)
        if callable(member):
            member(*arguments.pop(name, ()))
    engine.steps = 3
    del model, engine
    return set(arguments), *(m.locks_taken_with_gil() for m in (reducer._C, commhooks._C))


def test_no_lock_is_taken_with_the_gil_held() -> None:
    assert run_ranks(call_everything, 2) == [(set(), 0, 0)] * 2


# -------------------------------------------------------------------------------------- the turn


def share_a_bucket(rank: int, world_size: int) -> None:
    """Two threads run backward of a part each at the same time; one bucket has all gradients."""
    model = make_model(100, bucket_cap_mb=25, gradient_as_bucket_view=True)
    model.register_comm_hook(None, lambda state, bucket: _completed(bucket.buffer().mul_(2)))
    layers, start = list(model.module), threading.Barrier(2)
    model.module.forward = lambda x: (
        torch.stack([layer(x).sum() for layer in layers[::2]]).sum(),
        torch.stack([layer(x).sum() for layer in layers[1::2]]).sum(),
    )

    def run(part: torch.Tensor) -> None:
        start.wait()
        part.backward()

    for _ in range(100):
        model.zero_grad()
        threads = [threading.Thread(target=run, args=(part,)) for part in model(torch.ones(1, 4))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model.reducer.check_finalized()
        for parameter in model.parameters():
            assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))


def _completed(tensor: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(tensor)
    return future


def test_two_threads_pack_into_one_bucket() -> None:
    run_ranks(share_a_bucket, 1, timeout=60)


class Waiting:
    """A hook whose results come when the step is aborted, or at once."""

    def __init__(self) -> None:
        self.waits = False
        self.pending: list[Future[torch.Tensor]] = []
        self.on_call: Callable[[], object] | None = None

    def __call__(self, bucket: GradBucket) -> Future[torch.Tensor]:
        if self.on_call is not None:
            self.on_call()
        if not self.waits:
            return _completed(bucket.buffer())
        self.pending.append(Future())
        return self.pending[-1]

    def abort(self, has_run: bool) -> None:
        while self.pending:
            self.pending.pop().set_exception(ValueError("aborted"))


def abort_steps(rank: int, world_size: int) -> None:
    model = make_model(1, find_unused_parameters=True)  # everything is written back at the end
    engine, hook = model.reducer, Waiting()
    engine.set_hook(hook)
    backward(model)

    # From a hook: nothing is left to be averaged.
    hook.on_call = engine.abort
    backward(model)
    hook.on_call = None
    assert engine.steps == 1
    backward(model)

    # From an observer, while averages are written back.
    engine.set_observer(lambda indices: engine.abort())
    with pytest.raises(RuntimeError, match="aborted before all averages were written back"):
        backward(model)
    engine.set_observer(None)
    assert engine.steps == 2

    # While another thread waits for the averages, or is about to.
    model.require_manual_backward_finalization = True
    for _ in range(20):
        hook.waits = True
        backward(model)
        with reading(lambda: _finalize(engine)):
            engine.abort()
        hook.waits = False
        backward(model)
        engine.finalize_backward()
    assert engine.steps == 22


def _finalize(engine: Any) -> None:
    with suppress(ValueError):  # of abort()
        engine.finalize_backward()


def test_steps_may_be_aborted_at_any_time() -> None:
    run_ranks(abort_steps, 1, timeout=20)


def finalize_twice(rank: int, world_size: int) -> None:
    """Two threads end the same step, which one of them does."""
    model = make_model()
    model.reducer.set_hook(Waiting())
    model.require_manual_backward_finalization = True
    for _ in range(20):
        before = model.reducer.steps
        backward(model)
        threads = [threading.Thread(target=model.reducer.finalize_backward) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert model.reducer.steps == before + 1


def test_two_threads_finalize_a_backward() -> None:
    run_ranks(finalize_twice, 1)
