"""Streams of a device, simulated on CPU tensors, on which what is not ordered is an error.

    with simulated() as simulation:
        model(x).backward()
    assert not simulation.problems

Operations run at once, as on any CPU. But each belongs to the stream that is current where it is
called, and a vector clock of each stream tells what is certain to run before it. Two things are
problems, whatever the streams' speeds:

- a stream accesses memory, and nothing orders it after a write by another stream, or a write after
  an access;
- memory is freed that another stream than its owner has used: the allocator would hand it out again
  at once, to the owner. The other stream must have been recorded (``record_stream``), or the owner
  must have waited for it.

Collectives are operations on the stream that awaits them, as on NCCL. A host that reads a number
waits for the stream. All tensors are taken for tensors of the device. Of torch's wrapper and of
FSDP, only what they call is simulated: a bucket is packed on the stream of backward, FSDP averages
between replicas on a stream of its own, and both wait for the results.

Not seen:

- accesses by raw pointers in C++: packing and unpacking, for which :func:`simulated` stands in
  where a runner is called and where backward has ended, and hooks that run there. Launches of
  kernels and calls of :mod:`commhooks.native` are seen, as if they wrote to all their tensors;
- what callbacks of torch's futures do on threads of a backend, such as the average of a sparse
  gradient, which stays on the streams that torch gives to the callback;
- what torch's autograd does without its dispatcher, and FSDP's own streams;
- torchft, whose managers are not simulated.
"""

import gc
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.futures import Future
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import commhooks
from commhooks import native
from commhooks.adapters.fsdp.gradients import FSDPAdapter
from commhooks.adapters.torch_ddp import TorchAdapter
from commhooks.comm import exchange
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookError
from commhooks.runtime import execution, hook_thread, side_stream, stream_runner, threaded_runner
from reducer import native as reducer_native

__all__ = ["Simulation", "simulated"]

Clock = dict[int, int]
"""How many operations of each stream are certain to be over."""

_PACKAGE = Path(commhooks.__file__).parent
_READS_NOTHING = {
    "empty_like",
    "full_like",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "zeros_like",
}
_READS_ON_HOST = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select"}


@dataclass
class _Block:
    """Memory of one storage."""

    storage: StorageWeakRef
    owner: int
    place: str
    written: tuple[int, int]
    """Stream and time of the last write."""
    used: Clock = field(default_factory=dict)
    """Times of the last access by each stream."""
    recorded: set[int] = field(default_factory=set)


class Simulation:
    """What is certain of the order of operations so far.

    Args:
        ignored: The call that has no effect: see :attr:`calls`.
    """

    def __init__(self, ignored: str = "") -> None:
        self.problems: dict[str, None] = {}
        """A sentence for each place with a problem, in the order in which they were found."""
        self.calls: set[str] = set()
        """What has ordered streams or recorded one, and where it was called."""
        self.launched: list[Future[Tensor]] = []
        """The futures of buckets for which backward has not waited."""
        self._ignored = ignored
        self._lock = threading.RLock()
        self._clocks: list[Clock] = [{}]
        self._host: Clock = {}
        self._blocks: dict[int, _Block] = {}
        self._used_by_others: dict[int, _Block] = {}
        self._thread = threading.local()

    @property
    def current(self) -> int:
        """The current stream of this thread, 0 by default."""
        return getattr(self._thread, "stream", 0)

    @current.setter
    def current(self, stream: int) -> None:
        self._thread.stream = stream

    def new_stream(self) -> int:
        self._clocks.append({})
        return len(self._clocks) - 1

    def position(self, stream: int) -> Clock:
        """Return what is over when ``stream`` has done what was enqueued so far."""
        with self._lock:
            self._check_freed()
            return dict(self._clocks[stream])

    def wait(self, stream: int, position: Clock) -> None:
        with self._lock:
            self._check_freed()
            if self.counts("wait"):
                _advance(self._clocks[stream], position)

    def record(self, tensor: Tensor, stream: int) -> None:
        with self._lock:
            self._check_freed()
            block = self._block(tensor)
            if block is not None and self.counts("record"):
                block.recorded.add(stream)

    def own(self, tensor: Tensor) -> None:
        """Let memory belong to the current stream."""
        with self._lock:
            block = self._block(tensor)
            if block is not None:
                block.owner = self.current

    def wait_on_host(self, stream: int) -> None:
        with self._lock:
            self._check_freed()
            _advance(self._host, self._clocks[stream])

    def access(self, name: str, read: Any = (), written: Any = ()) -> None:
        """Run an operation on the current stream, which accesses tensors."""
        with self._lock:
            self._check_freed()
            stream = self.current
            clock = self._clocks[stream]
            _advance(clock, self._host)
            clock[stream] = clock.get(stream, 0) + 1
            for tensor in _tensors(read):
                self._access(name, tensor, stream, writes=False)
            for tensor in _tensors(written):
                self._access(name, tensor, stream, writes=True)

    def unpack(self) -> None:
        """Let the current stream wait for the averages of all buckets, as backward does."""
        while self.launched:
            self.access("unpacking", read=self.launched.pop(0).wait())

    def finish(self) -> None:
        """Check what has been freed since the last operation."""
        gc.collect()
        with self._lock:
            self._check_freed()

    def _access(self, name: str, tensor: Tensor, stream: int, *, writes: bool) -> None:
        block = self._block(tensor)
        if block is None:
            return
        clock = self._clocks[stream]
        others = block.used if writes else dict([block.written])
        late = [s for s, time in others.items() if s != stream and clock.get(s, 0) < time]
        if late:
            self._report(
                f"{name} on stream {stream} {'writes' if writes else 'reads'} memory of "
                f"{block.place} that stream {late[0]} uses at the same time"
            )
        block.used[stream] = clock[stream]
        if writes:
            block.written = stream, clock[stream]
        if stream != block.owner:
            self._used_by_others[block.storage.cdata] = block

    def _block(self, tensor: Tensor) -> _Block | None:
        """Return the block of a tensor, a new one of the current stream if it is not known."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.device.type != "cpu":
            return None
        key = storage._cdata
        if key not in self._blocks:
            stream = self.current
            now = self._clocks[stream].get(stream, 0)
            block = _Block(StorageWeakRef(storage), stream, _place(), (stream, now), {stream: now})
            self._blocks[key] = block
        return self._blocks[key]

    def _check_freed(self) -> None:
        freed = [key for key, block in self._used_by_others.items() if block.storage.expired()]
        for key in freed:
            block = self._used_by_others.pop(key)
            del self._blocks[key]
            owner = self._clocks[block.owner] | {}
            _advance(owner, self._host)
            for stream, time in block.used.items():
                is_known = stream in block.recorded or owner.get(stream, 0) >= time
                if stream != block.owner and not is_known:
                    self._report(
                        f"memory of {block.place} on stream {block.owner} is freed while stream "
                        f"{stream} uses it"
                    )
        if len(self._blocks) > 2000:
            for key in [key for key, block in self._blocks.items() if block.storage.expired()]:
                del self._blocks[key]

    def counts(self, kind: str) -> bool:
        """Note a call by a side stream; return whether it has an effect."""
        callers = _callers()
        if " < " not in callers:
            return True  # by a future
        self.calls.add(f"{kind}: {callers}")
        return f"{kind}: {callers}" != self._ignored

    def _report(self, problem: str) -> None:
        self.problems.setdefault(f"{problem}, at {_place()}")


class _Mode(TorchDispatchMode):
    """Tells the simulation of the operations of a thread."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        declared = function._schema.arguments
        values = dict(zip((it.name for it in declared), args, strict=False)) | (kwargs or {})
        name = function.overloadpacket.__name__
        read, written = [], [result] if not function.is_view else []
        for argument in declared:
            alias, value = argument.alias_info, values.get(argument.name)
            if alias is None and function.namespace != "c10d":
                read += [] if name in _READS_NOTHING else [value]
            elif alias is None or alias.is_write:
                written.append(value)
        if not function.is_view:
            self._simulation.access(str(function), read, written)
        if name in _READS_ON_HOST:
            self._simulation.wait_on_host(self._simulation.current)
        return result


@contextmanager
def simulated(ignored: str = "") -> Iterator[Simulation]:
    """Take CPU tensors for those of a device, in all runners of hooks."""
    simulation = Simulation(ignored)
    with ExitStack() as stack:
        for owner, name, value in _replacements(simulation):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Mode(simulation))
        yield simulation
        simulation.finish()


def _replacements(simulation: Simulation) -> Iterator[tuple[Any, str, Any]]:
    """Yield what makes the runtime use the simulation: an object, an attribute and its value."""

    class Event:
        def __init__(self, **_: Any) -> None:
            self.position: Clock = {}

        def record(self, stream: "Stream") -> None:
            self.position = simulation.position(stream.stream_id)

    class Stream:
        """Has what the runtime uses of torch.Stream."""

        device_index, device_type = 0, 1

        def __init__(self, *_: Any, stream_id: int | None = None, **__: Any) -> None:
            self.stream_id = simulation.new_stream() if stream_id is None else stream_id
            self._before = 0

        def record_event(self) -> Event:
            event = Event()
            event.record(self)
            return event

        def wait_event(self, event: Event) -> None:
            simulation.wait(self.stream_id, event.position)

        def synchronize(self) -> None:
            simulation.wait_on_host(self.stream_id)

        def __enter__(self) -> None:
            self._before, simulation.current = simulation.current, self.stream_id

        def __exit__(self, *_: object) -> None:
            simulation.current = self._before

    class DeviceFuture(Future):  # type: ignore[type-arg]
        """A future of a tensor on the device, which orders the streams that wait for it."""

        def set_result(self, result: Any) -> None:
            self.position = simulation.position(simulation.current)
            super().set_result(result)

        def wait(self) -> Any:
            result = super().wait()
            simulation.wait(simulation.current, self.position)
            for tensor in _tensors(result):
                simulation.record(tensor, simulation.current)
            return result

    accelerator = mock.Mock(current_stream=lambda _: Stream(stream_id=simulation.current))
    fake_torch = mock.Mock(wraps=torch, Stream=Stream, Event=Event, accelerator=accelerator)
    yield side_stream, "torch", fake_torch
    yield side_stream, "_has_streams", lambda _: True
    yield (
        Tensor,
        "record_stream",
        lambda tensor, stream: simulation.record(tensor, stream.stream_id),
    )
    yield exchange, "new_future", lambda _: DeviceFuture()
    yield execution, "new_future", lambda _: DeviceFuture()

    backward = Stream()

    def packing(launch: Any, runner: Any, bucket: Any) -> Any:
        # No variable may hold a future, which may have an error that refers to this frame.
        launched = simulation.launched
        caller = simulation.current
        simulation.wait(backward.stream_id, simulation.position(caller))
        with backward:
            simulation.own(bucket.buffer())
            simulation.record(bucket.buffer(), caller)  # as the reducer does before it unpacks
            simulation.access("packing", written=bucket.buffer())
            launched.append(launch(runner, bucket))
        try:
            return launched[-1]
        finally:
            if bucket.is_last():  # the reducer waits for all right after this one
                wait_for_all()

    def torchs_bucket(run: Any, adapter: Any, bucket: Any) -> Any:
        try:
            return run(adapter, bucket)
        finally:
            if bucket.is_last():  # it may be a sparse one, which no runner gets
                wait_for_all()

    def all_reduce_of_fsdp(reduce: Any, *args: Any) -> None:
        main, own = simulation.current, simulation.new_stream()
        simulation.wait(own, simulation.position(main))
        simulation.current = own
        try:
            reduce(*args)
        finally:
            simulation.current = main
            simulation.wait(main, simulation.position(own))
            simulation.launched.clear()  # the adapter has waited

    def wait_for_all() -> None:
        try:
            simulation.unpack()
        except CommHookError as error:
            error.__traceback__ = None  # the future holds the error

    def collective(pending: Any, comm: Any, operation: str, start: Any, *rest: Any) -> Any:
        def run(group: Any, *options: Any) -> Any:
            used = [cell.cell_contents for cell in start.__closure__ or ()]
            simulation.access(operation, written=used)
            return start(group, *options)

        return pending(comm, operation, run, *rest)

    def watched(main: Any, thread: Any) -> None:
        with _Mode(simulation):
            main(thread)

    def native_call(function: Any, *args: Any, **kwargs: Any) -> Any:
        simulation.access(function.__name__, written=[*args, *kwargs.values()])
        return function(*args, **kwargs)

    def wrapped(owner: Any, name: str, wrapper: Any) -> tuple[Any, str, Any]:
        original = getattr(owner, name)
        return owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs)

    yield wrapped(stream_runner.StreamRunner, "__call__", packing)
    yield wrapped(threaded_runner.ThreadedRunner, "__call__", packing)
    yield wrapped(TorchAdapter, "run", torchs_bucket)
    yield wrapped(FSDPAdapter, "_reduce", all_reduce_of_fsdp)
    yield wrapped(Communicator, "_pending", collective)
    yield wrapped(hook_thread.HookThread, "_main", watched)
    yield wrapped(reducer_native, "pack", native_call)
    for name, function in vars(native).items():
        if callable(function) and not isinstance(function, type):
            yield wrapped(native, name, native_call)


def _advance(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, time in other.items():
        clock[stream] = max(time, clock.get(stream, 0))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_sparse:
        with _disable_current_modes():
            yield from (value._indices(), value._values())
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _place() -> str:
    """Return the line of the package that runs, or of the caller."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE)}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        frame = frame.f_back
    return "the training loop"


def _callers() -> str:
    """Return the functions of side_stream.py that run, and what has called them."""
    names: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            if path.name != "side_stream.py":
                names.append(frame.f_code.co_qualname)
                break
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return " < ".join(names)
