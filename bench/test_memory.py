"""The memory of hooks besides the model and its gradients, each in new processes.

tests/project/test_memory_page.py compares their state with the formulas in docs/memory.md.
"""

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  # wrappers load it in their first step, the bare module not

from bench.measured_hooks import MEASURED_HOOKS, entry_of
from commhooks import CommHook
from commhooks.cluster import Ranks
from commhooks.hook.base import tree
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.comparison.rank_side import EntryRun
from commhooks.lab.models import Workload

STEPS = 4  # buckets are rebuilt after the first


def usage(rank: int, model: str, entry: Entry) -> dict[str, int]:
    """Return bytes of a process that trains ``model`` for a few steps.

    ``peak_bytes`` and ``between_steps_bytes`` are resident memory, with gradients freed.
    """
    workload = Workload(model)
    module = workload.make_module()
    gradient_bytes = sum(parameter.nbytes for parameter in module.parameters())
    run = EntryRun(entry, module, workload, rank, first_step=0)
    for _ in range(STEPS):
        run.step()
        run.clear()
    gc.collect()
    hook = run.handle.hook if run.handle is not None else None
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, peak = (1024 * int(status[field].split()[0]) for field in ("VmRSS", "VmHWM"))
    return {
        "gradient_bytes": gradient_bytes,
        "state_bytes": state_bytes(hook) if isinstance(hook, CommHook) else 0,
        "between_steps_bytes": resident,
        "peak_bytes": peak,
    }


def state_bytes(hook: CommHook) -> int:
    """Return the bytes of the saved state of a hook and its nested hooks."""
    entries = [entry for each in tree(hook) for entry in each.state.values()]
    storages = [tensor.untyped_storage() for entry in entries for tensor in entry.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


MODEL = "bench.models:four_layers"
_PEAKS = ("diloco:period=2", "diloco:period=2,inner=int4", "diloco:period=2,delay=1", "topk")
"""Steps in which DiLoCo's averages are due, and those of a warm-up."""
NOISE = 0.05  # share of the gradients: other allocations of the process
RANKS = 2


@pytest.fixture(scope="module", autouse=True)
def _freed_memory_goes_back() -> Iterator[None]:
    """Make the C library return memory, so that peaks do not depend on fragmentation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "MALLOC_MMAP_THRESHOLD_", "65536")
        yield


@functools.cache
def usage_of(name: str) -> dict[str, int]:
    """Return the figures of the rank that needed most."""
    with Ranks(RANKS) as ranks:
        return max(ranks(usage, MODEL, entry_of(name)), key=lambda used: used["peak_bytes"])


@pytest.mark.benchmark(group="memory")
@pytest.mark.parametrize("hook", ["torch", *MEASURED_HOOKS, *_PEAKS])
def test_memory(benchmark: Any, hook: str) -> None:
    """Measure memory; the time that is shown is that of starting the processes."""
    bare = usage_of("bare")
    used = dict(benchmark.pedantic(usage_of, (hook,), rounds=1, iterations=1))
    if hook == "allreduce":
        torch_peak = usage_of("torch")["peak_bytes"]
        assert used["peak_bytes"] <= torch_peak + NOISE * used["gradient_bytes"]
    for name in ("between_steps_bytes", "peak_bytes"):
        used[name] -= bare[name]
    ratio = used["peak_bytes"] / used["gradient_bytes"]
    benchmark.extra_info.update(used, peak_to_gradients=ratio)
