"""The memory of hooks besides the model and its gradients, each in new processes.

tests/project/test_memory_page.py compares their state with the formulas in docs/memory.md.
"""

import functools
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  # wrappers load it in their first step, the bare module not

from bench.measured_hooks import MEASURED_HOOKS, entry_of
from commhooks import CommHook
from commhooks.cluster import Ranks
from commhooks.hook.base import tree
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.comparison.remote import Turn
from commhooks.lab.models import Workload

STEPS = 4  # buckets are rebuilt after the first


@dataclass(frozen=True)
class Usage:
    """Bytes of one rank. ``peak`` and ``between_steps``: resident memory, with gradients freed."""

    gradient_bytes: int
    state_bytes: int
    between_steps: int
    peak: int


def usage(rank: int, model: str, entry: Entry) -> Usage:
    """Measure a process that trains ``model`` for a few steps."""
    workload = Workload(model)
    module = workload.make_module()
    gradient_bytes = sum(parameter.nbytes for parameter in module.parameters())
    turn = Turn(entry, module, workload, rank, first_step=0)
    for _ in range(STEPS):
        turn.step()
        turn.clear()
    gc.collect()
    hook = turn.handle.hook if turn.handle is not None else None
    state = state_bytes(hook) if isinstance(hook, CommHook) else 0
    return Usage(gradient_bytes, state, _status("VmRSS"), _status("VmHWM"))


def state_bytes(hook: CommHook) -> int:
    """Return the bytes of the saved state of a hook and its nested hooks."""
    entries = [entry for each in tree(hook) for entry in each.state.values()]
    storages = [tensor.untyped_storage() for entry in entries for tensor in entry.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _status(field: str) -> int:
    """Return a field of the status of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return 1024 * int(values[field].split()[0])


MODEL = "bench.models:four_layers"
NOISE = 0.05  # share of the gradients: other allocations of the process
RANKS = 2


@pytest.fixture(scope="module", autouse=True)
def _freed_memory_goes_back() -> Iterator[None]:
    """Make the C library return memory, so that peaks do not depend on fragmentation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "MALLOC_MMAP_THRESHOLD_", "65536")
        yield


@functools.cache
def usage_of(name: str) -> Usage:
    """Return the figures of the rank that needed most."""
    with Ranks(RANKS) as ranks:
        return max(ranks(usage, MODEL, entry_of(name)), key=lambda used: used.peak)


@pytest.mark.benchmark(group="memory")
@pytest.mark.parametrize("hook", ["torch", *MEASURED_HOOKS])
def test_memory(benchmark: Any, hook: str) -> None:
    """Measure memory; the time that is shown is that of starting the processes."""
    bare = usage_of("bare")
    used = benchmark.pedantic(usage_of, (hook,), rounds=1, iterations=1)
    if hook == "allreduce":
        torch_peak = usage_of("torch").peak
        assert used.peak <= torch_peak + NOISE * used.gradient_bytes
    benchmark.extra_info.update(
        gradient_bytes=used.gradient_bytes,
        state_bytes=used.state_bytes,
        between_steps_bytes=used.between_steps - bare.between_steps,
        peak_bytes=used.peak - bare.peak,
        peak_to_gradients=(used.peak - bare.peak) / used.gradient_bytes,
    )
