"""Replays of a hook's work on a bucket, which a CUDA graph has captured.

Note [Replays]
~~~~~~~~~~~~~~
A hook takes hundreds of microseconds of the host per bucket, for launches, collectives, allocations
and Python. From the step ``capturable_from`` on, it does the same work for a bucket in each step:
the same kernels and collectives on the same memory. So the work is captured once as a CUDA graph,
and replayed with one launch. The coroutine stays the only description of the hook.

1. *When*. A bucket is captured if its memory and all states of the hook are those of its last run.
   So each state exists, outside of the graph, before it is captured. Otherwise, and after a failure
   or a loaded state, the hook runs as usual. All ranks need not agree: what a graph sends meets
   what the hook sends on another rank. NCCL must not register buffers for that
   (``NCCL_GRAPH_REGISTER=0``, the default here): over NVLink, ranks that capture exchange addresses
   and would wait for a rank that does not.
2. *Memory*. All graphs of a hook share one pool, which is gone with the last of them. They are
   replayed on one stream, one after the other, so the messages of one bucket reuse the memory of
   those of another bucket. The results stay, because their graphs refer to them.
3. *Failures*. The watchdog of NCCL's process group does not know what a graph sends. So a step in
   which a rank may replay ends, on all ranks, with a small all-reduce that it knows, completed
   after all replays: a missing peer ends in the same time-out as without graphs.

``COMMHOOKS_CUDA_GRAPHS=1``, on all ranks, turns replays on, on NCCL; not with
``TORCH_NCCL_BLOCKING_WAIT=1``, by which the host asks for events that a capture has recorded.
"""

import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commhooks.hook.base import CommHook, TensorState, tree
from commhooks.runtime.recording import Run
from reducer import GradBucket

SWITCH = "COMMHOOKS_CUDA_GRAPHS"
_BLOCKS = any(os.environ.get(f"{prefix}NCCL_BLOCKING_WAIT") == "1" for prefix in ("", "TORCH_"))
MAX_CAPTURES = 3 if os.environ.get(SWITCH) == "1" and not _BLOCKS else 0
"""Per bucket. Where the memory of a bucket changes again and again, capturing costs more."""
if MAX_CAPTURES:
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # NCCL reads it in the first capture


class Replay:
    """The work of a hook on one bucket, as a graph.

    Attributes:
        result: The average, in memory that each replay writes again.
        run: The record of the captured run.
    """

    result: Tensor
    run: Run

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self._graph = torch.cuda.CUDAGraph()
        self.is_captured = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture what the current stream is given, which it does not do."""
        # Other threads of the process, such as the watchdog, may go on to ask for their events.
        self._graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a graph that the error has invalidated
                self._graph.capture_end()
            raise
        self._graph.capture_end()
        self.is_captured = True

    def launch(self) -> None:
        """Do the captured work on the current stream."""
        self._graph.replay()


@dataclass
class _Bucket:
    """What is known of a bucket: ``memory`` and ``states`` are those of its last run."""

    names: frozenset[str]
    memory: tuple[Any, ...] = ()
    states: Sequence[TensorState] = ()
    captures: int = 0
    replay: Replay | None = None


class Replays:
    """The graphs of one hook, by bucket: Note [Replays]."""

    def __init__(self, hook: CommHook) -> None:
        self._hooks = list(tree(hook))
        self._buckets: dict[str, _Bucket] = {}

    def of(self, bucket: GradBucket) -> Replay | None:
        """Return what to replay for a bucket, or to capture first; None if the hook has to run."""
        known = self._buckets.get(bucket.key) or self._open(bucket)
        buffer = bucket.buffer()
        memory = buffer.data_ptr(), buffer.numel(), buffer.dtype
        if memory != known.memory or not self._has_states(known):
            known.memory, known.states = memory, [hook.state for hook in self._hooks]
            known.replay = None
        elif known.replay is None and known.captures < MAX_CAPTURES:
            known.captures += 1
            pools = (each.replay.pool for each in self._buckets.values() if each.replay)
            known.replay = Replay(next(pools, None) or torch.cuda.graph_pool_handle())
        return known.replay

    def has_run(self) -> bool:
        """Whether a bucket has run with the present states, so that they exist."""
        return any(self._has_states(known) for known in self._buckets.values())

    def clear(self) -> None:
        """Forget all graphs. The next step runs the hook."""
        self._buckets.clear()

    def _has_states(self, known: _Bucket) -> bool:
        """Whether the states of the hook are the same objects as in the last run of a bucket."""
        states = (hook.state for hook in self._hooks)
        return bool(known.states) and all(map(operator.is_, known.states, states))

    def _open(self, bucket: GradBucket) -> _Bucket:
        """Add a bucket, and drop those that it was rebuilt from."""
        names = frozenset(bucket.names)
        kept = {k: each for k, each in self._buckets.items() if names.isdisjoint(each.names)}
        self._buckets = kept | {bucket.key: _Bucket(names)}
        return self._buckets[bucket.key]
