"""Fixtures for tests on several ranks, samples of large parameter grids, and a summary of skips.

The parent of xdist's workers runs no tests, so it does not spend seconds on importing torch.
"""

import contextlib
import gc
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from support.covering import covering_sample
from support.integrations import MISSING

with contextlib.suppress(ImportError):  # `make gpu-check` runs without it
    import hypothesis

    # No test is timed, and a failure comes again.
    hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("random", deadline=None)
    hypothesis.settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Make torch use one thread, and fork ranks."""
    # Each connection to a store asks a name server who ::ffff:127.0.0.1 is. Some servers stop
    # answering after a few hundred questions. /etc/hosts is enough here.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    # Tests that name no device are for the CPU, also where there is a GPU.
    os.environ.setdefault("COMMHOOKS_DEVICE", "cpu")
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the parent of xdist's workers
    import torch
    from support.forking import can_fork, fork_worker

    import commhooks.cluster.ranks

    # Most tensors are tiny here, and threads that wait for such work take CPU time from the ranks.
    torch.set_num_threads(1)
    if can_fork():
        commhooks.cluster.ranks.start_worker = fork_worker


@pytest.fixture(scope="module")
def _ranks_closed() -> Iterator[None]:
    """End rank processes with each module: what its tests have left open costs CPU time.

    The thread of a Gloo device wakes up a hundred times a second.
    """
    yield
    from commhooks.testing import close_ranks

    close_ranks()


@pytest.fixture
def run_ranks(_ranks_closed: None) -> Any:
    """:func:`commhooks.testing.run_ranks`, whose processes end with the module of the test."""
    from commhooks.testing import run_ranks

    return run_ranks


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Two threads for the loops of the tests of a module."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases outside of the sample of ``@pytest.mark.covering`` as exhaustive."""
    grids: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_sampled = item.get_closest_marker("covering") and hasattr(item, "callspec")
        if is_sampled and not item.get_closest_marker("exhaustive"):
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        marker = cases[0].get_closest_marker("covering")
        assert marker is not None
        values = [
            [repr(value) for _, value in sorted(case.callspec.params.items())] for case in cases
        ]
        sample = covering_sample(values, *marker.args)
        for index, case in enumerate(cases):
            if index not in sample:
                case.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish() -> None:
    """Let garbage collections skip the modules and tests loaded so far: 0.2 s each time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report skipped tests in one line per reason, instead of one per test."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
    )
    for reason, count in reasons.most_common():
        kind = "GPU tests" if reason == "no CUDA device" else "tests"
        terminalreporter.write_line(f"{kind}: {count} skipped, {reason}")
    if MISSING:
        terminalreporter.write_line(
            f"tests/integrations: not run; make test-all installs {', '.join(MISSING)}"
        )
