"""Auto on a link of a known rate, which changes while training goes on."""

import subprocess
import time
from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from commhooks.cluster import Ranks
from commhooks.cluster.links import ShapedLink, shaped_link, unavailable

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

WIDTH = 512
_training: dict[str, Any] = {}


def begin(rank: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    model = commhooks.DistributedDataParallel(net, bucket_cap_mb=2)
    _training.update(rank=rank, model=model, handle=commhooks.register(model, "auto", **options))


def train(rank: int, steps: int) -> dict[str, Any]:
    model, hook = _training["model"], _training["handle"].hook
    start = time.monotonic()
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        model.zero_grad()
        model(torch.randn(64, WIDTH)).square().mean().backward()
    return {
        "step_seconds": (time.monotonic() - start) / steps,
        "metrics": hook.metrics(),
        "plan": hook.plan.to_json(),
        "hooks": hook.plan.hook_of(),
        "history": [(each.step, each.reason) for each in hook.history],
    }


def limit_rate(link: ShapedLink, bits_per_second: float) -> None:
    for prefix in link.prefixes:
        tbf = ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", "1000000", "latency", "50ms"]
        change = [*prefix, "tc", "qdisc", "change", "dev", link.interface, "root", *tbf]
        subprocess.run(change, check=True)


def test_the_plan_follows_the_rate() -> None:
    with shaped_link(2, 50e6) as link, Ranks(2, link, timeout=300) as ranks:
        ranks(begin, {"error": 0.3, "candidates": ["bf16", "int8", "int4"]})
        slow = ranks(train, 60)
        assert slow[0]["plan"] == slow[1]["plan"]
        assert slow[0]["metrics"]["link_megabits_per_second"] == pytest.approx(50, rel=0.25)
        lossy = [name for name, hook in slow[0]["hooks"].items() if hook != "allreduce"]
        assert len(lossy) >= 6  # of 8 matrices
        limit_rate(link, 20e9)
        fast = ranks(train, 150)
        assert fast[0]["plan"] == fast[1]["plan"]
        assert fast[0]["metrics"]["link_megabits_per_second"] > 500
        assert any("the link changed" in reason for _, reason in fast[0]["history"])
