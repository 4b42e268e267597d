"""Auto on a link of a known rate, which changes while training goes on."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.links import needs_links
from torch import nn

import commhooks
from commhooks.algorithms.adaptive import planner
from commhooks.cluster import Ranks
from commhooks.cluster.links import ShapedLink, burst_bytes, shaped_link

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
    needs_links,
]

WIDTH = 512
_training: dict[str, Any] = {}


def begin(rank: int) -> None:
    planner._SHARE = 0.1  # steps take far less time than those of a real training
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    model = commhooks.DistributedDataParallel(net, bucket_cap_mb=2)
    options: dict[str, Any] = {"error": 0.3, "candidates": ["bf16", "int8", "int4"]}
    _training.update(model=model, handle=commhooks.register(model, "auto", **options))


def train(rank: int, steps: int) -> dict[str, Any]:
    model, hook = _training["model"], _training["handle"].hook
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        model.zero_grad()
        model(torch.randn(64, WIDTH)).square().mean().backward()
    return {
        "rate": hook.metrics()["link_megabits_per_second"],
        "plan": hook.plan.to_json(),
        "reasons": [each.reason for each in hook.history],
    }


def limit_rate(link: ShapedLink, megabits: float) -> None:
    rate = megabits * 1e6
    tbf = ("rate", f"{rate:.0f}bit", "burst", f"{burst_bytes(rate):.0f}", "latency", "50ms")
    for prefix in link.prefixes:
        change = [*prefix, "tc", "qdisc", "change", "dev", link.interface, "root", "tbf", *tbf]
        subprocess.run(change, check=True)


def test_the_plan_follows_the_rate() -> None:
    """However long it takes: on a busy machine, some estimates are far off."""
    with shaped_link(2, 50e6) as link, Ranks(2, link, timeout=200) as ranks:
        ranks(begin)

        def train_until(megabits: float, is_near: Callable[[float], bool]) -> dict[str, Any]:
            limit_rate(link, megabits)
            for _ in range(12):
                found = ranks(train, 50)
                assert found[0]["plan"] == found[1]["plan"]
                if is_near(found[0]["rate"]):
                    return found[0]  # type: ignore[no-any-return]
            raise AssertionError(f"expected {megabits} Mbit/s, found {found[0]['rate']}")

        slow = train_until(50, lambda rate: 30 < rate < 70)
        lossy = [row for row in slow["plan"]["rows"] if row["hook"] != "allreduce"]
        assert sum(len(row["names"]) for row in lossy) >= 6  # of 8 matrices
        fast = train_until(500, lambda rate: rate > 150)  # the machine may be too busy for all
        again = train_until(50, lambda rate: 30 < rate < 70)
        for before, after in ((slow, fast), (fast, again)):  # seconds depend on the machine as well
            new = after["reasons"][len(before["reasons"]) :]
            assert any("the link changed" in reason for reason in new)
