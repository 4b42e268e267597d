"""CUDA graphs, emulated on CPU tensors: what is captured is recorded, and a replay does it again.

    with recorded_graphs() as graphs:
        ...                       # a runner captures and replays
    assert graphs.replays > 0

A capture leaves all memory as it was. A replay fills the memory that the capture has allocated with
NaN afterwards, except for the result, because graphs share it. What the host reads during a capture
is an error. Launches of emulated kernels, calls of :mod:`commhooks.native` and collectives are
recorded, and torch's operations.
"""

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
from emulation import Emulation
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from commhooks import kernels, native
from commhooks.comm.communicator import PendingCollective
from commhooks.kernels.source import Source
from commhooks.runtime import replays, stream_runner
from commhooks.runtime.replays import Replay
from reducer import native as reducer_native
from reducer.peers import wait

_READS_ON_HOST = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select"}


@dataclass
class Counts:
    """How often graphs were captured and replayed."""

    captures: int = 0
    replays: int = 0
    recording: "RecordedGraph | None" = field(default=None, repr=False)


class Pool:
    """Memory that graphs share, which torch drops with the last of them."""

    def __init__(self) -> None:
        self.is_used = False
        self.graphs: weakref.WeakSet[RecordedGraph] = weakref.WeakSet()


class _Mode(TorchDispatchMode):
    def __init__(self, graph: "RecordedGraph") -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function._schema.name.partition("::")[2]
        if name in _READS_ON_HOST:
            raise RuntimeError(f"{name} is not permitted when the stream is capturing")
        result = function(*args, **(kwargs or {}))
        is_view = any(
            it.alias_info and not it.alias_info.is_write for it in function._schema.returns
        )
        if not is_view:
            self._graph.add(function, args, kwargs or {}, result)
        return result


class RecordedGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    counts: ClassVar[Counts]

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self._before: set[int] = set()
        self._allocated: dict[int, Tensor] = {}
        self._saved: list[tuple[Tensor, torch.UntypedStorage]] = []

    def capture_begin(self, pool: "Pool", capture_error_mode: str) -> None:
        del capture_error_mode
        assert pool.graphs or not pool.is_used, "the pool is gone with the last graph that used it"
        pool.is_used = True
        pool.graphs.add(self)
        everything = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        known = {each.untyped_storage().data_ptr(): each for each in everything}
        self._saved = [(each, each.untyped_storage().clone()) for each in known.values()]
        self._before = set(known)
        self._mode = _Mode(self)
        self.counts.recording = self
        self._mode.__enter__()

    def capture_end(self) -> None:
        self._mode.__exit__(None, None, None)
        del self._mode  # which refers to this graph
        self.counts.recording = None
        for tensor, storage in self._saved:
            tensor.untyped_storage().copy_(storage)
        self._saved.clear()
        self.counts.captures += 1

    def replay(self, result: Tensor) -> None:
        self.counts.replays += 1
        for do in self._work:
            do()
        for pointer, tensor in self._allocated.items():
            if tensor.is_floating_point() and pointer != result.untyped_storage().data_ptr():
                tensor.fill_(torch.nan)

    def add(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call, whose results a replay writes to the same memory again."""
        results = [each for each in _flat(result) if isinstance(each, Tensor)]
        for each in results:
            pointer = each.untyped_storage().data_ptr()
            if pointer not in self._before:
                self._allocated.setdefault(pointer, each)

        def do() -> None:
            again = function(*args, **kwargs)
            for old, new in zip(results, _flat(again), strict=False):
                if old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._work.append(do)

    def do(self, work: Callable[[], Any]) -> Any:
        """Do and record work that torch's dispatcher does not see as a whole."""
        with _disable_current_modes():
            result = work()
        self._work.append(lambda: work() and None)
        return result


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [each for part in value for each in _flat(part)]
    return [value]


class _Backend(Emulation):
    """Records the launches of emulated kernels: their arguments have eight bytes each."""

    def launch(self, source: Source, kernel: str, *rest: Any) -> None:
        grid, block, parameters, count, device = rest
        pointers = (ctypes.c_void_p * count).from_address(parameters)
        values = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers]

        def work() -> None:
            kept = (ctypes.c_uint64 * count)(*values)
            start, size = ctypes.addressof(kept), ctypes.sizeof(ctypes.c_uint64)
            again = (ctypes.c_void_p * count)(*(start + i * size for i in range(count)))
            address = ctypes.addressof(again)
            Emulation.launch(self, source, kernel, grid, block, address, count, device)

        _record(work)


def _record(work: Callable[[], Any]) -> Any:
    graph = RecordedGraph.counts.recording
    return work() if graph is None else graph.do(work)


@contextmanager
def recorded_graphs() -> Iterator[Counts]:
    """Let the runner of backends that keep the order capture and replay, on CPU tensors."""
    counts = RecordedGraph.counts = Counts()
    find_finite, pack = native.all_finite, reducer_native.pack

    def all_finite(tensor: Tensor) -> Tensor:
        result = torch.empty((), dtype=torch.bool)
        _record(lambda: result.copy_(find_finite(tensor)))
        return result

    def run(pending: PendingCollective, group: Any) -> None:
        start = pending.start
        _record(lambda: wait(start(group)))

    with ExitStack() as patches:
        for owner, name, value in (
            (torch.cuda, "CUDAGraph", RecordedGraph),
            (torch.cuda, "graph_pool_handle", Pool),
            (replays, "MAX_CAPTURES", 3),
            (Replay, "launch", lambda replay: replay._graph.replay(replay.result)),
            (stream_runner, "_can_capture", lambda *_: True),
            (native, "all_finite", all_finite),
            (reducer_native, "pack", lambda *args: _record(lambda: pack(*args))),
            (PendingCollective, "run", run),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        patches.enter_context(mock.patch.dict(kernels.BACKENDS, cpu=_Backend()))
        yield counts
