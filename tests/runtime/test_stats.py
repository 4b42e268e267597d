"""Statistics of hooks: counted bytes, means per step, tables."""

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.comm.wire import all_reduce_bytes
from commhooks.runtime.recording import Run
from commhooks.runtime.stats import KEPT_STEPS, BucketStats, HookStats, StatsCollector


def make_bucket(names: list[str], index: int = 0) -> commhooks.GradBucket:
    parameters = [nn.Parameter(torch.zeros(10)) for _ in names]
    return commhooks.GradBucket(
        torch.zeros(10 * len(names)), parameters, names, index=index, is_last=False
    )


def record(
    collector: StatsCollector,
    bucket: commhooks.GradBucket,
    wire_bytes: int | None,
    seconds: float,
    *,
    is_exchange: bool = False,
) -> None:
    times = 5, 5 + round(seconds * 1e9)
    run = Run(bucket.key, bucket.index(), wire_bytes, *times, is_exchange=is_exchange)
    collector.record(run, bucket)


def test_the_collector_gives_means_per_step() -> None:
    collector = StatsCollector()
    first, second = make_bucket(["a", "b"]), make_bucket(["c"], index=1)
    for wire, seconds in [(10, 1.0), (30, 3.0)]:
        record(collector, first, wire, seconds)
        record(collector, second, 40, 1.0)
    stats = collector.stats(world_size=2)
    assert stats.steps == 2
    assert stats.buckets == (
        BucketStats(0, ("a", "b"), 80, 20.0, 4.0, 2.0, None),
        BucketStats(1, ("c",), 40, 40.0, 1.0, 1.0, None),
    )
    assert stats.total == BucketStats(None, ("a", "b", "c"), 120, 60.0, 2.0, 3.0, None)
    assert collector.wire_bytes(first.key, 2) == 20.0
    assert collector.wire_bytes(first.key, 1) == 30.0
    assert collector.wire_bytes(first.key, KEPT_STEPS + 1) == 20.0
    assert collector.wire_bytes("another", 2) is None


def test_the_last_steps() -> None:
    collector = StatsCollector()
    bucket = make_bucket(["a"])
    for wire in (40, 40, 10, 20):
        record(collector, bucket, wire, wire / 10)
    record(collector, bucket, 5, 1.0, is_exchange=True)
    stats = collector.stats(2, last=2)
    assert (stats.steps, stats.total.wire_bytes, stats.total.hook_seconds) == (2, 17.5, 1.5)
    assert stats.total.gradient_bytes == 40
    assert collector.stats(2, last=9) == collector.stats(2)
    for _ in range(KEPT_STEPS):
        record(collector, bucket, 8, 1.0)
    stats = collector.stats(2, last=5000)
    assert (stats.steps, stats.total.wire_bytes) == (KEPT_STEPS, 8)


def test_the_last_steps_of_units() -> None:
    """A unit may have several runs in a step, or none."""
    collector = StatsCollector()
    collector.units = {"a": ("a",), "b": ("b",)}
    for wires in ((40, 2), (10, 3), (10,)):
        collector.begin_step()
        for name, wire in zip("ab", wires, strict=False):
            record(collector, make_bucket([name]), wire, 1.0)
            record(collector, make_bucket([name]), wire, 1.0)
    found = [bucket.wire_bytes for bucket in collector.stats(2, last=2).buckets]
    assert found == [20.0, 3.0]
    record(collector, make_bucket(["trained later"]), 7, 1.0)
    assert collector.stats(2).buckets[0].names == ("trained later",)


def train_with_warm_up(rank: int, size: int) -> None:
    for wrapper in (commhooks.DistributedDataParallel, TorchDistributedDataParallel):
        model = wrapper(nn.Linear(64, 64))
        handle = commhooks.register(model, "powersgd", rank=4, start_step=10)
        for _ in range(14):
            model(torch.ones(2, 64)).sum().backward()
        assert re.fullmatch(
            r"HookHandle\(PowerSGD\(rank=4, .*\) on Linear, 14 steps\)", repr(handle)
        )
        ratio = handle.stats().total.ratio
        assert ratio is not None
        assert ratio < 2
        recent = handle.stats(last=4)
        assert recent.steps == 4
        assert recent.total.ratio == pytest.approx(64 * 65 / (4 * 128 + 64))
        with pytest.raises(commhooks.CommHookError, match="at least 1 step, found 0"):
            handle.stats(last=0)
        handle.replace("bf16")
        model(torch.ones(2, 64)).sum().backward()
        assert handle.stats(last=1).total.ratio == 2
        handle.remove()
        assert repr(handle) == "HookHandle(removed)"


@dataclass
class Alternating(commhooks.CommHook):
    """Sends a quarter. C++ stands in in steps 4 to 7, and sends a half."""

    def native(self, group: Any, step: int | None = None) -> Any:
        return commhooks.create("fp16").native(group) if step in range(4, 8) else None

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        await comm.all_reduce(bucket.buffer()[: bucket.buffer().numel() // 4].clone())
        return bucket.buffer()


def switch_ways(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(63, 64), stable_buckets=True)
    handle = commhooks.register(model, Alternating())
    found = []
    for _ in range(10):
        model(torch.ones(2, 63)).sum().backward()
        found.append((handle.stats(), handle.stats(last=3)))
    assert [stats.steps for stats, _ in found] == list(range(1, 11))
    plain = all_reduce_bytes(4 * 64 * 64, size)
    sent = [plain / 4] * 4 + [plain / 2] * 4 + [plain / 4] * 2
    for step, (stats, _) in enumerate(found):
        assert stats.total.wire_bytes == pytest.approx(sum(sent[: step + 1]) / (step + 1))
    # C++ knows means over all steps only; after it, the last steps are those of the runner.
    assert [recent.steps for _, recent in found] == [1, 2, 3, 3, 5, 6, 7, 8, 1, 2]
    assert found[5][1] == found[5][0]
    assert found[8][1].total.wire_bytes == found[9][1].total.wire_bytes == plain / 4


def send_in_every_third_step(rank: int, size: int) -> HookStats:
    model = commhooks.DistributedDataParallel(nn.Linear(8, 8, bias=False))
    handle = commhooks.register(model, "local_sgd", period=3)
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
    return handle.stats()


def test_bytes_are_of_the_same_steps_as_all_other_figures(run_ranks: Any) -> None:
    """Not of the first one, though its bucket has the same parameters when it is rebuilt."""
    for stats in run_ranks(send_in_every_third_step, 2):
        assert (stats.steps, stats.left_out) == (3, 1)
        assert stats.total.wire_bytes == pytest.approx(all_reduce_bytes(4 * 64, 2) / 3)


def test_means_over_steps_in_which_cpp_stands_in(run_ranks: Any) -> None:
    """They were those of one way only, and of the last steps there were none."""
    run_ranks(switch_ways, 2)


def test_the_last_steps_are_without_the_warm_up(run_ranks: Any) -> None:
    run_ranks(train_with_warm_up, 2)


def test_rebuilt_buckets_replace_the_old_ones() -> None:
    collector = StatsCollector()
    record(collector, make_bucket(["a", "b", "c"]), 1, 1.0)
    record(collector, make_bucket(["c", "b"]), 2, 1.0)
    record(collector, make_bucket(["a"], index=1), 3, 1.0)
    stats = collector.stats(2)
    assert [bucket.names for bucket in stats.buckets] == [("c", "b"), ("a",)]
    assert (stats.steps, stats.left_out) == (1, 1)


def test_unknown_and_absent_traffic() -> None:
    collector = StatsCollector()
    record(collector, make_bucket(["a"]), None, 1.0)
    record(collector, make_bucket(["b"], index=1), 0, 1.0)
    stats = collector.stats(2)
    assert [(bucket.wire_bytes, bucket.ratio) for bucket in stats.buckets] == [
        (None, None),
        (0.0, None),
    ]
    assert stats.total.wire_bytes is None
    assert "total" in str(stats)


def test_rows_for_a_table() -> None:
    collector = StatsCollector()
    record(collector, make_bucket(["a", "b"]), 8, 1.0)
    record(collector, make_bucket(["c"], index=1), None, 2.0)
    rows = json.loads(json.dumps(collector.stats(2).to_dicts()))
    common = {"steps": 1, "exposed_seconds": None}
    assert rows == [
        {**common, "bucket": 0, "names": ["a", "b"], "gradient_bytes": 80}
        | {"wire_bytes": 8.0, "ratio": 10.0, "hook_seconds": 1.0},
        {**common, "bucket": 1, "names": ["c"], "gradient_bytes": 40}
        | {"wire_bytes": None, "ratio": None, "hook_seconds": 2.0},
        {**common, "bucket": "total", "names": ["a", "b", "c"], "gradient_bytes": 120}
        | {"wire_bytes": None, "ratio": None, "hook_seconds": 3.0},
    ]


def test_nothing_yet() -> None:
    assert StatsCollector().stats(2) == HookStats.of(0, [], 2)
    assert "0 steps" in str(StatsCollector().stats(2))


def count_steps(rank: int, size: int, wrapper: type[nn.Module], hook: str) -> list[str]:
    model = wrapper(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), bucket_cap_mb=0.0001)
    handle = commhooks.register(model, hook)
    shown = []

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(2, 10)).sum().backward()
        shown.append(str(handle.stats()).splitlines()[0])

    train(5)
    handle.load_state_dict({**handle.state_dict(), "step": 1000})
    train(1)
    handle.replace(hook)
    train(2)
    return shown


@pytest.mark.parametrize("hook", ["allreduce", "int8"])
@pytest.mark.parametrize(
    "wrapper", [commhooks.DistributedDataParallel, TorchDistributedDataParallel]
)
def test_the_table_says_which_steps_are_left_out(
    run_ranks: Any, wrapper: type[nn.Module], hook: str
) -> None:
    """All buckets are rebuilt after the first step."""
    is_native = hook == "allreduce" and wrapper is commhooks.DistributedDataParallel
    way = ", through host memory" if is_native else ""
    assert run_ranks(count_steps, 2, wrapper, hook)[0] == [
        f"means per step over 4 steps; 1 before buckets were rebuilt left out{way}",
        f"means per step over 5 steps; 1 before buckets were rebuilt left out{way}",
        f"means per step over 2 steps{way}",
    ]


@dataclass
class Twice(commhooks.CommHook):
    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        await comm.all_reduce(torch.ones(100))
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


def function(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def measure(rank: int, size: int, torch_ddp: bool) -> dict[str, HookStats]:
    wrapper = TorchDistributedDataParallel if torch_ddp else commhooks.DistributedDataParallel
    net = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(3)))
    model = wrapper(net, bucket_cap_mb=0.0001)
    handle = commhooks.register(model, "noop")
    found = {}
    for name, hook in {
        "allreduce": "allreduce",
        "fp16": "fp16",
        "noop": "noop",
        "coroutine": Twice(),
        "function": function,
    }.items():
        handle.replace(hook)
        assert handle.stats().steps == 0
        for _ in range(4):
            model(torch.ones(1, 10)).sum().backward()
        found[name] = handle.stats()
    return found


@pytest.mark.parametrize("torch_ddp", [False, True])
def test_counted_on_a_model(run_ranks: Any, torch_ddp: bool) -> None:
    """A bucket has 400 bytes; each of two ranks sends half of them twice."""
    for found in run_ranks(measure, 2, torch_ddp):
        wire = {"allreduce": 400, "fp16": 200, "noop": 0, "coroutine": 800, "function": None}
        ratios = {"allreduce": 1.0, "fp16": 2.0, "noop": None, "coroutine": 0.5, "function": None}
        for name, stats in found.items():
            assert [bucket.index for bucket in stats.buckets] == [0, 1, 2], name
            assert sorted(stats.total.names) == ["0.weight", "1.weight", "2.weight"]
            assert [bucket.gradient_bytes for bucket in stats.buckets] == [400] * 3
            assert [bucket.wire_bytes for bucket in stats.buckets] == [wire[name]] * 3, name
            assert [bucket.ratio for bucket in stats.buckets] == [ratios[name]] * 3, name
            assert stats.total.gradient_bytes == 1200
            assert (stats.total.exposed_seconds is None) == torch_ddp
        assert [stats.steps for stats in list(found.values())[1:]] == [4] * 4
        assert found["coroutine"].total.hook_seconds > 0
