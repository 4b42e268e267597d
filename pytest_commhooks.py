"""The pytest plugin of commhooks: the fixture ``hook_benchmark``, see docs/benchmarking.md.

pytest imports it in every suite, so torch and commhooks are imported only by the fixture. That is
why it is not in the package, whose import imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from commhooks.lab.comparison.hook_benchmarks import HookBenchmarks, ModuleBenchmarks

_module: pytest.StashKey[ModuleBenchmarks] = pytest.StashKey()
"""The benchmarks of the current test module."""
_tables = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which replace those of tests."""
    group = parser.getgroup("commhooks")
    for name, kind, text in [
        ("world-size", int, "number of ranks"),
        ("link", str, "rate of a link between the ranks, as in 1gbit; 'loopback' for none"),
        ("steps", int, "timed steps of each hook"),
    ]:
        group.addoption(f"--hook-{name}", type=kind, help=f"hook_benchmark: {text}")
    what = "hook_benchmark: device of the ranks"
    group.addoption("--hook-device", choices=("cpu", "cuda"), help=what)


@pytest.fixture
def hook_benchmark(request: pytest.FixtureRequest, benchmark: Any) -> HookBenchmarks:
    """Benchmark a communication hook. Needs pytest-benchmark: pip install 'commhooks[bench]'.

    ``hook_benchmark("powersgd", rank=4, model=Net, batch=make_batch, world_size=2, link="1gbit")``
    verifies the hook. All hooks of a module are timed at its end, in turn. See
    :class:`commhooks.lab.comparison.hook_benchmarks.HookBenchmarks`.
    """
    from commhooks.lab.comparison.hook_benchmarks import HookBenchmarks, ModuleBenchmarks

    stash = request.config.stash
    if _module not in stash:
        stash[_module] = ModuleBenchmarks(request.module.__name__, request.path)
        request.config.add_cleanup(stash[_module].close)
    options = {
        name: value
        for name in ("world_size", "link", "steps", "device")
        if (value := request.config.getoption(f"hook_{name}")) is not None
    }
    return HookBenchmarks(stash[_module], benchmark, options)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Time the hooks of a module after its last test, unless the session ends before."""
    stash = item.config.stash
    try:
        if _module in stash and (nextitem is None or nextitem.path != item.path):
            module = stash[_module]
            del stash[_module]
            try:
                if not (item.session.shouldfail or item.session.shouldstop):
                    # pytest-timeout times this one test. The time-out of the ranks remains.
                    if cancel := getattr(item.config.hook, "pytest_timeout_cancel_timer", None):
                        cancel(item=item)
                    module.time_in_turn()
            finally:
                module.close()
                stash.setdefault(_tables, {}).update(module.tables)
    finally:
        result = yield  # to pytest, which ends the fixtures also if a hook has failed
    return result


@pytest.hookimpl(trylast=True)  # after pytest-benchmark's table
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the figures for which pytest-benchmark has no columns."""
    for title, table in terminalreporter.config.stash.get(_tables, {}).items():
        terminalreporter.section(f"communication hooks: {title}")
        terminalreporter.write_line(table)
