"""Traces of steps: the format, the order of events, and what goes wrong."""

import copy
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks

Event = dict[str, Any]
SLOW = 0.3  # seconds: much more than a hook takes, on a busy machine as well


class SlowLinear(nn.Module):
    """Whose backward takes so long that hooks of later layers are under way or over by then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.pause = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.linear(inputs)
        hidden.register_hook(lambda _: time.sleep(self.pause))
        return hidden


@dataclass
class TwoStages(commhooks.CommHook):
    """Sums, then the same again, among all."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        average = await comm.all_reduce(bucket.buffer().div_(comm.size))
        await comm.all_gather(average[:2].clone())
        return average


@dataclass
class Broken(commhooks.CommHook):
    """Fails on all ranks."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        raise ValueError("broken")


def function(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


HOOKS: dict[str, Any] = {
    "two stages": TwoStages(),
    "allreduce": "allreduce",
    "powersgd": commhooks.create("powersgd", start_step=0, rank=2),
    "function": function,
}


def traced(
    rank: int, size: int, folder: str, torch_ddp: bool, hook: str, pause: float = 0.0
) -> Event:
    net = nn.Sequential(*(SlowLinear() for _ in range(3)))
    model = (
        TorchDistributedDataParallel(net, bucket_cap_mb=0.0001)
        if torch_ddp
        # Host memory has no thread, which would note the end of an average within backward.
        else commhooks.DistributedDataParallel(net, bucket_cap_mb=0.0001, host_memory=False)
    )
    handle = commhooks.register(model, copy.deepcopy(HOOKS[hook]))
    inputs = torch.ones(4, 8) * (rank + 1)
    for _ in range(2):  # buckets are rebuilt before the second
        model(inputs).sum().backward()
    for layer in net:
        layer.pause = pause
    with handle.trace(f"{folder}/step.json") as path:
        for _ in range(2):
            model(inputs).sum().backward()
    for layer in net:
        layer.pause = 0.0
    assert path.name == ("step.json" if rank == 0 else f"step.rank{rank}.json")
    document: Event = json.loads(path.read_text())
    model(inputs).sum().backward()
    return document


def slices(document: Event, category: str) -> list[Event]:
    return [e for e in document["traceEvents"] if e.get("cat") == category and e["ph"] == "X"]


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def is_within(inner: Event, outer: Event) -> bool:
    return bool(outer["ts"] <= inner["ts"] + 1e-3 and end(inner) <= end(outer) + 1e-3)


def check_format(document: Event, rank: int) -> None:
    """What the format asks for, and slices of a track nested or apart."""
    assert document["otherData"]["rank"] == rank
    assert document["otherData"]["clock"] == "CLOCK_MONOTONIC"
    now_us = time.monotonic_ns() / 1e3
    tracks: dict[int, list[Event]] = {}
    for event in document["traceEvents"]:
        assert event["pid"] == rank
        assert isinstance(event["tid"], int)
        assert event["name"]
        assert event["ph"] in ("M", "X", "i")
        if event["ph"] == "M":
            continue
        assert now_us - 300e6 < event["ts"] <= now_us
        if event["ph"] == "i":
            assert event["s"] == "t"
        else:
            assert event["dur"] >= 0
            tracks.setdefault(event["tid"], []).append(event)
    for track in tracks.values():
        track.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_slices: list[Event] = []
        for event in track:
            while open_slices and end(open_slices[-1]) <= event["ts"] + 1e-3:
                open_slices.pop()
            assert not open_slices or is_within(event, open_slices[-1]), (event, open_slices[-1])
            open_slices.append(event)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_step_on_our_engine(run_ranks: Any, tmp_path: Path, hook: str) -> None:
    documents = run_ranks(traced, 2, str(tmp_path), False, hook, SLOW)
    parameters = {f"{layer}.linear.{name}" for layer in range(3) for name in ("weight", "bias")}
    for rank, document in enumerate(documents):
        check_format(document, rank)
        assert len(slices(document, "backward")) == len(slices(document, "drain")) == 2
        assert [e["args"]["step"] for e in slices(document, "drain")] == [2, 3]
        hooks = slices(document, "hook")
        buckets = len({e["args"]["bucket"] for e in hooks})
        assert buckets >= 3
        assert len(hooks) == 2 * buckets
        assert {name for e in hooks for name in e["args"]["parameters"]} == parameters
        arrivals = [e for e in document["traceEvents"] if e.get("cat") == "gradient"]
        assert sorted(e["name"] for e in arrivals) == sorted([*parameters] * 2)
        for step, drain in enumerate(slices(document, "drain")):
            check_order(document, hooks[step * buckets : (step + 1) * buckets], drain)


def check_order(document: Event, hooks: list[Event], drain: Event) -> None:
    """Arrival, pack, launch, hook, wait, unpack of each bucket of one step."""
    backward = max(
        (e for e in slices(document, "backward") if e["ts"] < drain["ts"]), key=lambda e: e["ts"]
    )

    def of_step(category: str, bucket: int) -> list[Event]:
        return [
            event
            for event in slices(document, category)
            if event["args"]["bucket"] == bucket and backward["ts"] <= event["ts"] <= end(drain)
        ]

    for hook in hooks:
        bucket = hook["args"]["bucket"]
        arrivals = [
            event
            for event in document["traceEvents"]
            if event["name"] in hook["args"]["parameters"]
            and backward["ts"] - 1e-3 <= event["ts"] <= end(drain)
        ]
        packs, (launch,) = of_step("pack", bucket), of_step("launch", bucket)
        (wait,), (unpack,) = of_step("wait", bucket), of_step("unpack", bucket)
        assert max(e["ts"] for e in arrivals) <= end(packs[-1])
        assert end(packs[-1]) <= launch["ts"] + 1e-3
        assert launch["ts"] <= hook["ts"] + 1e-3
        assert end(hook) <= unpack["ts"] + 1e-3
        assert end(wait) <= unpack["ts"] + 1e-3
        assert is_within(wait, drain)
        assert is_within(unpack, drain)
    # The last layer's hook is over before the first layer's gradient is there.
    first = min(hooks, key=lambda e: e["args"]["bucket"])
    assert end(first) < end(backward)


@pytest.mark.parametrize(
    ("hook", "operations", "wire_bytes"),
    [
        ("two stages", ["all_reduce", "all_gather", "vote"], [288, 8, 0]),
        ("allreduce", ["all_reduce"], [288]),
        ("function", [], []),
    ],
)
def test_stages_lie_within_their_hook(
    run_ranks: Any, tmp_path: Path, hook: str, operations: list[str], wire_bytes: list[int]
) -> None:
    """A layer has 72 numbers, so two ranks send 288 bytes in the sum, in one bucket or more."""
    for document in run_ranks(traced, 2, str(tmp_path), False, hook):
        stages = slices(document, "stage")
        for each in slices(document, "hook"):
            own = [s for s in stages if s["tid"] == each["tid"] and is_within(s, each)]
            assert [s["name"] for s in own] in (operations, operations[:2])
            assert [s["args"]["stage"] for s in own] == list(range(len(own)))
            assert sum(s["args"]["wire_bytes"] for s in own) == (each["args"]["wire_bytes"] or 0)
            assert all(end(a) <= b["ts"] + 1e-3 for a, b in itertools.pairwise(own))
        total = sum(s["args"]["wire_bytes"] for s in stages)
        buckets = len(slices(document, "hook")) // 2
        expected = 3 * wire_bytes[0] + buckets * sum(wire_bytes[1:]) if wire_bytes else 0
        assert total == 2 * expected


@pytest.mark.parametrize("hook", HOOKS)
def test_a_step_on_torchs_wrapper(run_ranks: Any, tmp_path: Path, hook: str) -> None:
    """Gradients, hooks and their stages; torch does not show the rest."""
    for rank, document in enumerate(run_ranks(traced, 2, str(tmp_path), True, hook)):
        check_format(document, rank)
        backwards, hooks = slices(document, "backward"), slices(document, "hook")
        assert [e["args"]["step"] for e in backwards] == [2, 3]
        assert len(hooks) >= 2 * 3
        assert all(any(is_within(hook, backward) for backward in backwards) for hook in hooks)
        arrivals = [e for e in document["traceEvents"] if e.get("cat") == "gradient"]
        assert len(arrivals) == 2 * 6
        for each in hooks:
            needed = [a for a in arrivals if a["name"] in each["args"]["parameters"]]
            assert len(needed) == 2 * len(each["args"]["parameters"])
        assert {e["cat"] for e in document["traceEvents"] if "cat" in e} <= {
            *("gradient", "hook", "stage", "turn", "backward")
        }
        if hook == "two stages":
            for stage in slices(document, "stage"):
                assert any(stage["tid"] == e["tid"] and is_within(stage, e) for e in hooks)


def test_traces_of_ranks_merge(run_ranks: Any, tmp_path: Path) -> None:
    documents = run_ranks(traced, 2, str(tmp_path), False, "two stages")
    paths = [tmp_path / "step.json", tmp_path / "step.rank1.json"]
    commhooks.merge_traces(paths, tmp_path / "all.json")
    merged = json.loads((tmp_path / "all.json").read_text())
    assert merged["traceEvents"] == [e for d in documents for e in d["traceEvents"]]
    # Both ranks are in their first sum at some moment.
    sums = [[s for s in slices(d, "stage") if s["name"] == "all_reduce"] for d in documents]
    assert max(s[0]["ts"] for s in sums) <= min(end(s[0]) for s in sums)


def test_other_machines_are_shifted_by_their_clocks(tmp_path: Path) -> None:
    for rank, (host, to_unix) in enumerate([("a", 100.0), ("a", 100.5), ("b", 400.0)]):
        about = {"rank": rank, "host": host, "clock_to_unix_us": to_unix}
        events = [{"ph": "M", "name": "x"}, {"ph": "i", "name": "x", "ts": 7.0, "pid": rank}]
        text = json.dumps({"traceEvents": events, "otherData": about})
        (tmp_path / f"{rank}.json").write_text(text)
    commhooks.merge_traces([tmp_path / f"{rank}.json" for rank in range(3)], tmp_path / "all.json")
    merged = json.loads((tmp_path / "all.json").read_text())
    assert [e["ts"] for e in merged["traceEvents"] if "ts" in e] == [7.0, 7.0, 307.0]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"traceEvents": []}'])
def test_merging_a_file_that_is_not_a_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(commhooks.CommHookError, match=r"x\.json is not a trace of one rank"):
        commhooks.merge_traces([tmp_path / "x.json"], tmp_path / "all.json")
    with pytest.raises(commhooks.CommHookError, match="at least one"):
        commhooks.merge_traces([], tmp_path / "all.json")


def in_trouble(rank: int, size: int, folder: str) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(8, 8))
    handle = commhooks.register(model, "bf16")
    trace: Callable[..., Any] = handle.trace
    with (
        pytest.raises(commhooks.CommHookError, match="there is no directory"),
        trace(f"{folder}/missing/step.json"),
    ):
        pass
    with (
        trace(f"{folder}/step.json"),
        pytest.raises(commhooks.CommHookError, match="being recorded already"),
        trace(f"{folder}/other.json"),
    ):
        pass
    # A failing step is written as far as it went, and the hook may change inside the block.
    with trace(f"{folder}/failed.json") as path:
        model(torch.ones(1, 8)).sum().backward()
        handle.replace(Broken())
        with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
            model(torch.ones(1, 8)).sum().backward()
    document = json.loads(path.read_text())
    check_format(document, rank)
    assert [e["name"] for e in slices(document, "hook")] == ["bf16", Broken.name]
    assert len(slices(document, "drain")) == 2
    with (
        pytest.raises(commhooks.CommHookError, match="ValueError: broken"),
        trace(f"{folder}/raised.json") as path,
    ):
        model(torch.ones(1, 8)).sum().backward()
    assert [e["name"] for e in slices(json.loads(path.read_text()), "hook")] == [Broken.name]
    handle.replace(TwoStages())
    with trace(f"{folder}/after.json") as path:
        model(torch.ones(1, 8)).sum().backward()
        handle.replace("allreduce")
        handle.replace(TwoStages())
        model(torch.ones(1, 8)).sum().backward()
    document = json.loads(path.read_text())
    assert len([s for s in slices(document, "stage") if s["name"] == "all_gather"]) == 2
    with trace(f"{folder}/nothing.json") as path:
        pass
    assert slices(json.loads(path.read_text()), "hook") == []


def test_errors_during_a_trace(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(in_trouble, 2, str(tmp_path))
