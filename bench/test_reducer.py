"""The reducer against torch's: backward of two models, both gradient modes, on one host.

``ratio_to_torch`` in extra_info is that of steps; ``backward_seconds`` has the backwards alone.
"""

from collections.abc import Callable

import pytest
from torch import nn

from bench.measured_hooks import NOOP_COPYING, HostFloor, OnHost, entry_of
from bench.models import ManySmall
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.comparison.hook_benchmarks import HookBenchmarks
from commhooks.lab.networks import Transformer

STEPS = 24
ON_HOST = OnHost("allreduce, host memory", {"name": "allreduce"})
# "noop" tells the engine that nothing changes, so nothing is packed. "noop, copying" is torch's own
# hook function on our engine, which packs and unpacks everything as torch does.
# With "host memory", ranks average through shared memory instead of over loopback. The least that
# this costs is a backward without hook, and then one sum.
ENTRIES = [
    *map(entry_of, ["allreduce", "torch noop", "noop"]),
    NOOP_COPYING,
    ON_HOST,
    OnHost("bf16, host memory", {"name": "bf16"}),
    HostFloor("noop, then a sum in host memory", {"name": "noop"}),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("model", [Transformer, ManySmall])
def test_averaging(
    hook_benchmark: HookBenchmarks,
    model: Callable[[], nn.Module],
    view: bool,
    set_to_none: bool,
    entry: Entry,
) -> None:
    """Measure plain averaging, and what the engine adds to a bare backward.

    Plain averaging: at most 0.95 of torch's time, and 0.65 through host memory. ``noop``: at most
    half of what torch adds when copying, and 0.05 of the bare backward with views.
    """
    wrapper = {"gradient_as_bucket_view": view}
    hook_benchmark(entry, model=model, steps=STEPS, wrapper=wrapper, set_to_none=set_to_none)


@pytest.mark.parametrize("entry", [ENTRIES[0], ON_HOST], ids=lambda entry: entry.name)
def test_four_ranks(hook_benchmark: HookBenchmarks, entry: Entry) -> None:
    """Measure plain averaging of four ranks: through host memory at most 0.70 of torch's time."""
    hook_benchmark(entry, model=Transformer, world_size=4, steps=STEPS)
