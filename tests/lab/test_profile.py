"""A profile shows the buckets of the engine, and dry runs use them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import small_models
from torch import nn

import commhooks
from commhooks.lab.models import ModelError
from commhooks.lab.simulation import Job
from commhooks.lab.simulation.dry_run import DryRunner
from commhooks.lab.simulation.measurements import ProfiledModel
from commhooks.lab.simulation.profile import profile
from commhooks.testing.ranks import run_ranks

MB = 0.003


def _loss(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 64)).square().mean()
    return loss


def _buckets(rank: int, world_size: int, config: dict[str, object]) -> tuple[list[object], ...]:
    hook = commhooks.create(config)
    model = small_models.make()
    assert dist.group.WORLD is not None
    hook.prepare(dict(model.named_parameters()), dist.group.WORLD)
    step = profile(model, _loss, hook.bucket_key, dist.group.WORLD, bucket_cap_mb=MB)
    other = commhooks.DistributedDataParallel(small_models.make(), bucket_cap_mb=MB)
    commhooks.register(other, config)
    for _ in range(2):
        _loss(other).backward()
    rows = other.reducer.bucket_stats()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for bucket in step.buckets:
        for name, view in zip(bucket.names, bucket.gradients(), strict=True):
            assert torch.equal(view, gradients[name])
    traces = step.trace.buckets
    assert [trace.gradient_bytes for trace in traces] == [b.buffer().nbytes for b in step.buckets]
    assert all(trace.backward_seconds > 0 and trace.unpack_seconds > 0 for trace in traces)
    assert [bucket.is_last() for bucket in step.buckets] == [False] * (len(rows) - 1) + [True]
    return [bucket.names for bucket in step.buckets], [row["names"] for row in rows]


@pytest.mark.parametrize(
    "config",
    [
        {"name": "allreduce"},
        {"name": "route", "rules": [["*.bias", "allreduce"]], "default": "int8"},
    ],
    ids=["plain", "by route"],
)
def test_buckets_are_those_of_the_engine(config: dict[str, object]) -> None:
    ((seen, real),) = run_ranks(_buckets, 1, config)
    assert seen == real
    assert len(seen) > 1


def _unused(rank: int, world_size: int) -> list[list[str]]:
    assert dist.group.WORLD is not None
    arguments = small_models.partly(), _loss, lambda _: None, dist.group.WORLD
    with pytest.raises(RuntimeError, match="find_unused_parameters=True if a step does not use"):
        profile(*arguments)
    side = ProfiledModel(rank, Job("support.small_models:partly"), busy=1)
    with pytest.raises(ModelError, match=r"its steps fail: .*find_unused_parameters=True"):
        side.dry_run({"name": "int8"}, [2])
    step = profile(*arguments, bucket_cap_mb=MB, find_unused_parameters=True)
    return [bucket.names for bucket in step.buckets]


def test_parameters_that_steps_do_not_use() -> None:
    (buckets,) = run_ranks(_unused, 1)
    assert {name for names in buckets for name in names} == {
        *("used.weight", "used.bias", "unused.weight", "unused.bias")
    }


def _dry_run(rank: int, world_size: int) -> list[bool]:
    job = Job("support.small_models:make", bucket_cap_mb=MB)
    side = ProfiledModel(rank, job, busy=2)
    natives = []
    for name in ("bf16", "int8"):
        runs = side.dry_run({"name": name}, [2, 4, 32])
        assert runs is not None
        ((share, trace),) = runs.by_size[4]
        assert share == 1.0
        assert trace.gradient_bytes == 4 * sum(p.numel() for p in small_models.make().parameters())
        local = [seconds for bucket in trace.buckets for seconds in bucket.local_seconds]
        assert all(seconds == 0 for seconds in local) == trace.is_native
        natives.append(trace.is_native)
    return natives


def test_native_hooks_have_no_work_of_their_own() -> None:
    # Two processes at once, each in a group of its own.
    assert run_ranks(_dry_run, 2) == [[True, False]] * 2


def _by_role(rank: int, world_size: int) -> list[float]:
    job = Job("support.small_models:make", bucket_cap_mb=MB)
    rules = [["@output", "noop"], ["@1d", "noop"]]
    config = {"name": "route", "rules": rules, "default": "allreduce"}
    runs = ProfiledModel(rank, job, busy=1).dry_run(config, [2])
    assert runs is not None
    return [trace.wire_bytes(2) for _, trace in runs.by_size[2]]


def test_hooks_know_the_roles_of_parameters() -> None:
    assert run_ranks(_by_role, 1) == [[4 * 2 * 64 * 64]]  # the first two of three layers


def _among_nodes(rank: int, world_size: int) -> list[str]:
    job = Job("support.small_models:make", ranks_per_node=2, bucket_cap_mb=MB)
    config = {"name": "hierarchical", "inner": "int8"}
    runs = ProfiledModel(rank, job, busy=1).dry_run(config, [1000])
    assert runs is not None
    ((_, trace), *_) = runs.at(1000)
    return [collective.operation for collective in trace.buckets[0].collectives]


def test_hooks_find_the_ranks_of_a_node_as_a_launcher_tells_them() -> None:
    assert run_ranks(_among_nodes, 1) == [["all_to_all", "all_to_all", "all_gather", "all_gather"]]


SPARSE: list[dict[str, Any]] = [
    {"name": "topk", "density": 0.02},
    {"name": "dgc", "density": 0.02, "warmup_steps": 0},
    {"name": "threshold", "value": 0.01},
    {"name": "schedule", "stages": [[0, "allreduce"], [1500, {"name": "topk", "density": 0.02}]]},
]
LARGE = [16, 64, 128, 1024]


def _in_large_worlds(rank: int, world_size: int) -> dict[str, list[tuple[float, float | None]]]:
    """The bytes of predicted and of stated steps, by hook; None for a hook without a formula."""
    side = ProfiledModel(rank, Job("support.small_models:make", bucket_cap_mb=MB), busy=1)
    found = {}
    for config in SPARSE:
        runs = side.dry_run(config, LARGE)
        assert runs is not None
        buckets = side.profile(lambda name: None).buckets
        found[str(config["name"])] = [
            (
                sum(share * trace.wire_bytes(size) for share, trace in runs.at(size)),
                DryRunner(config, buckets, side.parameters).stated_bytes(size),
            )
            for size in LARGE
        ]
        assert config["name"] != "threshold" or set(LARGE) <= runs.by_size.keys()
    return found


def test_sparse_hooks_send_the_bytes_of_their_formula_in_large_worlds() -> None:
    (found,) = run_ranks(_in_large_worlds, 1)
    assert [stated for _, stated in found.pop("threshold")] == [None] * len(LARGE)
    for name, sent in found.items():
        for size, (predicted, stated) in zip(LARGE, sent, strict=True):
            assert predicted == pytest.approx(stated, rel=0.01), (name, size)
