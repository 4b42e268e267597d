"""The estimate of a link that lets bursts pass, without processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from commhooks.algorithms.adaptive.fit import Point
from commhooks.algorithms.adaptive.link import Estimate, LinkTimes, backend_of, fit_link
from commhooks.algorithms.adaptive.link_watch import PROBE_MESSAGES, LinkWatch
from commhooks.algorithms.adaptive.observation import Observed

MB = 1e6
LINE_RATE, ROUND = 1e9, 1e-4
PAUSE = 0.05


class Link:
    """A token bucket, as that of ``tc tbf``. Rates are in bytes per second."""

    def __init__(self, rate: float, burst: float = 0.25 * MB) -> None:
        self.rate, self.burst = rate, burst
        self.times = LinkTimes(backend_of("gloo"), 2)
        self.now, self.tokens = 1.0, burst

    def send(self, nbytes: float) -> None:
        start = self.now
        free = min(self.tokens, nbytes)
        self.wait(ROUND + free / LINE_RATE + (nbytes - free) / self.rate, nbytes)
        seen = Observed("all_gather", (), int(nbytes), int(start * 1e9), int(self.now * 1e9))
        self.times.add(seen)

    def wait(self, seconds: float, nbytes: float = 0.0) -> None:
        self.now += seconds
        self.tokens = min(max(self.tokens + self.rate * seconds - nbytes, 0.0), self.burst)

    def report(self, sizes: Sequence[float], probe: float = 0.0) -> "Found":
        """Return the estimates after some steps, of which the first one probes."""
        probed = LinkTimes(backend_of("gloo"), 2)
        for _ in range(10):
            self.send(8)
            for nbytes in sizes:
                self.send(nbytes)
            self.times, times = probed, self.times
            for _ in range(PROBE_MESSAGES if probe else 0):
                self.send(probe)
            self.times, probe = times, 0.0
            self.wait(PAUSE)
        found = fit_link([self.times.encode()] * 2)
        self.times.clear()
        assert found is not None
        return Found(found, fit_link([probed.encode()] * 2))


@dataclass(frozen=True)
class Found:
    """What the watch takes of an Agreed."""

    link: Estimate | None
    probe: Estimate | None = None
    byte_cpu_seconds: float = float("nan")


def take(watch: LinkWatch, found: Any, step: int = 0, most_steps: int = 50) -> None:
    watch.take(found, step, most_steps=most_steps)


EXACT, LOSSY, TINY = [1 * MB] * 8, [0.05 * MB] * 8, [0.02 * MB] * 8


@pytest.mark.parametrize("rate", [5 * MB, 50 * MB])
def test_exact_averages_show_the_rate_in_spite_of_a_burst(rate: float) -> None:
    found = Link(rate, burst=1.5 * MB).report(EXACT).link
    assert found is not None
    assert 1 / found.cost(ROUND).per_byte == pytest.approx(rate, rel=0.05)


def watching(
    link: Link, watch: LinkWatch, sizes: Sequence[float], reports: int, most_steps: int = 1000
) -> int:
    """Return the number of probes."""
    probes, probe = 0, 0.0
    for i in range(reports):
        take(watch, link.report(sizes, probe), i, most_steps)
        probe = watch.probe_bytes() if watch.wants_probe else 0.0
        probes += probe > 0
    return probes


def test_the_estimate_stays_under_a_plan_of_small_messages_and_follows_the_rate() -> None:
    link, watch = Link(5 * MB), LinkWatch()
    assert not watching(link, watch, EXACT, 2)
    exact = watch.cost
    watch.expect_others()
    assert not watching(link, watch, LOSSY, 20)
    assert watch.cost == exact
    for rate in (50 * MB, 5 * MB):
        link.rate = rate
        assert 1 <= watching(link, watch, LOSSY, 5) <= 2
        assert watch.cost is not None
        assert 1 / watch.cost.per_byte == pytest.approx(rate, rel=0.2)


def test_long_rows_count_until_a_probe_does() -> None:
    """Rows of steps may have waited for a core, so that the link seems slower."""
    link, watch = Link(5 * MB), LinkWatch()
    for rate in (5 * MB, 1 * MB):
        link.rate = rate
        assert not watching(link, watch, EXACT, 1)
        assert watch.cost is not None
        assert 1 / watch.cost.per_byte == pytest.approx(rate, rel=0.05)
    take(watch, link.report(EXACT, 2 * MB))
    probed = watch.cost
    link.rate = 5 * MB
    assert watching(link, watch, EXACT, 1) == 0  # the first since
    assert watch.cost == probed
    link.rate = 1 * MB
    assert watching(link, watch, EXACT, 1) == 1


def test_what_messages_in_the_burst_do_not_show_a_probe_shows_now_and_then() -> None:
    link, watch = Link(5 * MB), LinkWatch()
    watching(link, watch, EXACT, 1)
    watch.expect_others()
    tiny = link.report(TINY).link
    assert tiny is not None
    assert 1 / tiny.cost(ROUND).per_byte > 20 * MB
    assert not watching(link, watch, TINY, 20)
    link.rate = 1 * MB
    assert 1 <= watching(link, watch, TINY, 20, most_steps=12) <= 2
    assert watch.cost is not None
    assert 1 / watch.cost.per_byte == pytest.approx(1 * MB, rel=0.2)


def estimate(row: int, per_byte: float = 1e-6, rounds: float = 1e-4) -> Estimate:
    return Estimate(rounds, row, Point(0.0, 1e6, 1e6 * per_byte))


def test_which_estimates_count() -> None:
    watch = LinkWatch()
    take(watch, Found(estimate(14)))  # better than none
    assert watch.probe_bytes() == 2**13  # exact averages of this model are no longer
    take(watch, Found(estimate(26, 2e-6)), 10)
    take(watch, Found(estimate(20, 1e-9)), 20)
    assert watch.cost == pytest.approx((1e-4, 2e-6))
    take(watch, Found(estimate(21, 3e-6)), 30)
    assert watch.cost == pytest.approx((1e-4, 3e-6))  # 2 MiB in a row are enough
    take(watch, Found(estimate(21, 1e-9)), 40)
    assert watch.cost == pytest.approx((1e-4, 3e-6))  # but not if they take no time
    assert not watch.wants_probe
    take(watch, Found(None), 80)
    assert watch.wants_probe
    take(watch, Found(None, estimate(20, 1e-6)), 100)
    assert watch.cost == pytest.approx((1e-4, 3e-6))  # nor is a short probe
    take(watch, Found(None, estimate(24, 1e-8)), 110)
    assert watch.cost == pytest.approx((1e-4, 1e-8))


def test_a_link_that_has_become_slow_is_not_probed_for_its_former_rate() -> None:
    watch = LinkWatch()
    take(watch, Found(estimate(26, 1e-9), estimate(25, 1e-9)))
    assert watch.probe_bytes() == 2**23  # 20 ms of 1 GB/s
    take(watch, Found(estimate(21, 1e-8)), 10)
    assert watch.probe_bytes() == 2**20
    take(watch, Found(None, estimate(21, 1e-8)), 20)
    assert watch.cost == pytest.approx((1e-4, 1e-8))


def test_the_least_time_of_a_core_counts() -> None:
    """In a probe, the process may do other work as well."""
    watch = LinkWatch()
    assert watch.byte_cpu_seconds == 0
    for seconds in (3e-9, 1e-9, float("nan"), 2e-9):
        take(watch, Found(None, byte_cpu_seconds=seconds))
    assert watch.byte_cpu_seconds == 1e-9


@pytest.mark.parametrize("is_probed", [False, True])
def test_a_resumed_run_probes_once(is_probed: bool) -> None:
    saved, watch = LinkWatch(), LinkWatch()
    take(saved, Found(estimate(22), estimate(22), 1e-9) if is_probed else Found(estimate(22)))
    watch.load(saved.to_json())
    assert watch.cost == saved.cost
    assert watch.byte_cpu_seconds == saved.byte_cpu_seconds
    take(watch, Found(estimate(14, 1e-9)), 1)
    assert watch.wants_probe
    take(watch, Found(estimate(23, 1e-9)), 2)
    assert watch.wants_probe == is_probed
    take(watch, Found(None, estimate(23, 5e-7)), 3)
    assert not watch.wants_probe
    assert watch.cost == pytest.approx((1e-4, 5e-7))


def test_late_small_messages_do_not_make_the_link_faster() -> None:
    watch, link = LinkWatch(), Link(5 * MB)
    take(watch, link.report(EXACT))
    exact = watch.cost
    late = link.report(EXACT).link
    assert late is not None
    take(watch, Found(late._replace(round_seconds=0.2)), 1)
    assert watch.cost == pytest.approx(exact, rel=0.05)
