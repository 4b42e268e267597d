"""A dry run sends the same bytes as real ranks, and as the hook's formula."""

from typing import Any

import pytest
import torch

import commhooks
from commhooks import CommHookError, algorithms
from commhooks.adapters.ddp import DDPAdapter
from commhooks.comm.communicator import Communicator
from commhooks.costs.step_trace import Members, StepTrace
from commhooks.hook.derived_bucket import bucket_with
from commhooks.lab.simulation.dry_run import DryRunner, fake_group
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters
from commhooks.testing.ranks import run_ranks
from reducer import GradBucket

WRAPPERS: dict[str, dict[str, Any]] = {
    "cast": {"inner": "allreduce"},
    "error_feedback": {"inner": {"name": "topk", "error_feedback": False}},
    "guard": {"inner": "int8", "max_error": 0.5},
    "hierarchical": {"inner": "int8", "ranks_per_node": 1},
    "route": {"rules": [["*r*", "int8"]], "default": "powersgd"},
    "schedule": {"stages": [[0, "allreduce"], [1000, "int8"]]},
    "skip_nonfinite": {"inner": "bf16"},
}
# The hooks of the package, because other tests register hooks of their own.
NAMES = sorted(algorithms.HOOKS.keys() - {"auto"})
CONFIGS = [{"name": name, **WRAPPERS.get(name, {})} for name in NAMES]
SHARED = {"name": "shared_topk"}
STEP = 1000


def make_buckets() -> tuple[list[GradBucket], dict[str, torch.Tensor]]:
    parameters = probe_parameters()
    gradients = draw_gradients(parameters, 1)
    names = list(parameters)
    groups = [names[:4], names[4:]]
    buckets = [
        GradBucket(
            torch.cat([gradients[name].reshape(-1) for name in group]),
            [parameters[name] for name in group],
            group,
            index=index,
            is_last=index == len(groups) - 1,
            step=STEP,
        )
        for index, group in enumerate(groups)
    ]
    return buckets, parameters


def sent(kinds: list[tuple[float, StepTrace]], nodes: int) -> float:
    """Mean bytes per step."""
    return sum(share * trace.wire_bytes(nodes) for share, trace in kinds)


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [2, 3, 32])
@pytest.mark.parametrize("config", [*CONFIGS, SHARED], ids=lambda config: config["name"])
def test_it_sends_the_bytes_of_the_formula(config, size):
    buckets, parameters = make_buckets()
    kinds = DryRunner(config, buckets, parameters, first_step=STEP, device=None).trace(size)
    assert sum(share for share, _ in kinds) == pytest.approx(1.0)
    hook = commhooks.create(config)
    hook.prepare(parameters, fake_group(size))
    stated = [hook.wire_bytes(bucket, size) for bucket in buckets]
    if None not in stated and len(kinds) == 1:
        assert sent(kinds, size) == sum(stated)


PERIODIC = ("diloco", "guard", "local_sgd", "threshold")
# Steps of these hooks differ, or depend on the gradients of other ranks.
STEADY = [config for config in CONFIGS if config["name"] not in PERIODIC]


# Hooks whose code is that of another one, but for a codec.
VARIANTS = {"bf16", "fp4", "fp8", "int2", "int4", "natural", "onebit", "terngrad"}


def bytes_among_ranks(rank: int, world_size: int, names: list[str]) -> dict[str, float | None]:
    """Mean bytes of two steps on this rank, by hook."""
    return {config["name"]: _sent_by(config) for config in STEADY if config["name"] in names}


def _sent_by(config: dict[str, Any]) -> float | None:
    trainer = Trainer(commhooks.create(config), stable_buckets=True)
    trainer.model.reducer.steps = STEP
    for step in range(2):
        trainer.step(draw_gradients(trainer.parameters, 1, step))
    return trainer.handle.stats().total.wire_bytes


def bytes_alone(rank: int, world_size: int, size: int, names: list[str]) -> dict[str, float]:
    """The same from dry runs on a single rank."""
    return {c["name"]: _dry_run_bytes(c, size) for c in STEADY if c["name"] in names}


def _dry_run_bytes(config: dict[str, Any], size: int) -> float:
    captured: list[GradBucket] = []

    def keep(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        captured.append(bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    trainer = Trainer(commhooks.create("noop"), stable_buckets=True)
    adapter = DDPAdapter(trainer.model)
    adapter.install(keep)
    hook = commhooks.create(config)
    hook.prepare(trainer.parameters, fake_group(size))
    adapter.regroup(hook.bucket_key)
    trainer.step(draw_gradients(trainer.parameters, 1))
    runner = DryRunner(config, captured, trainer.parameters, first_step=STEP, device=None)
    return sent(runner.trace(size), size)


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (3, sorted({config["name"] for config in STEADY} - VARIANTS)),
        pytest.param(3, sorted(VARIANTS), marks=pytest.mark.exhaustive),
        pytest.param(2, [config["name"] for config in STEADY], marks=pytest.mark.exhaustive),
    ],
)
def test_it_sends_the_bytes_of_real_ranks(size, names):
    real = run_ranks(bytes_among_ranks, size, names, timeout=200)[0]
    alone = run_ranks(bytes_alone, 1, size, names, timeout=200)[0]
    assert alone == pytest.approx(real)


@pytest.mark.parametrize("sharded", [True, False])
def test_collectives_name_their_members_among_nodes(sharded):
    buckets, parameters = make_buckets()
    config = {"name": "hierarchical", "inner": "int8", "sharded": sharded}
    (_, trace), *_ = DryRunner(config, buckets, parameters, ranks_per_node=4, device=None).trace(12)
    found = [(c.operation, c.members) for c in trace.buckets[0].collectives]
    inside = Members(4, spans_nodes=False)
    between = Members(1, spans_nodes=True, parallel=4 if sharded else 1)
    before, after = ("all_to_all", "all_gather") if sharded else ("all_reduce", "broadcast")
    assert found == [
        (before, inside),
        ("all_to_all", between),
        ("all_gather", between),
        (after, inside),
    ]


def test_auto_needs_a_plan():
    """It chooses by the times of its own collectives, which are none here."""
    buckets, parameters = make_buckets()
    with pytest.raises(CommHookError, match="commhooks plan"):
        DryRunner({"name": "auto"}, buckets, parameters, device=None).trace(4)


def test_a_periodic_hook_has_two_kinds_of_steps():
    buckets, parameters = make_buckets()
    config = {"name": "local_sgd", "period": 8}
    kinds = DryRunner(config, buckets, parameters, device=None).trace(4)
    assert sorted(share for share, _ in kinds) == pytest.approx([1 / 8, 7 / 8])
    (quiet,) = [trace for share, trace in kinds if share > 0.5]
    assert all(not bucket.collectives for bucket in quiet.buckets)


def test_local_work_is_timed_before_between_and_after():
    buckets, parameters = make_buckets()
    ((_, step),) = DryRunner({"name": "int8"}, buckets, parameters).trace(4)
    for trace in step.buckets:
        assert len(trace.local_seconds) == len(trace.collectives) + 1 == 3
        assert all(seconds > 0 for seconds in trace.local_seconds)


class Broken(commhooks.CommHook):
    name = "broken"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> torch.Tensor:
        raise RuntimeError("no GPU here")


class Solitary(commhooks.CommHook):
    name = "solitary"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> torch.Tensor:
        return await comm.among([comm.rank]).all_reduce(bucket.buffer())


def test_collectives_of_a_single_rank_are_left_out(monkeypatch):
    monkeypatch.setattr("commhooks.lab.simulation.dry_run.create", lambda config: Solitary())
    buckets, parameters = make_buckets()
    kinds = DryRunner({"name": "solitary"}, buckets, parameters, device=None).trace(4)
    assert all(not trace.collectives for _, step in kinds for trace in step.buckets)


EXCHANGES = [
    ({"name": "diloco", "period": 8, "delay": 3, "inner": "int8"}, 3),
    ({"name": "diloco", "period": 8, "delay": 8}, 8),
]


@pytest.mark.parametrize(("config", "delay"), EXCHANGES)
def test_exchanges_send_the_bytes_of_the_formula_and_tell_their_delay(config, delay):
    buckets, parameters = make_buckets()
    kinds = DryRunner(config, buckets, parameters, first_step=STEP, device=None).trace(4)
    assert sum(share for share, _ in kinds) == pytest.approx(1)
    ((share, trace),) = [kind for kind in kinds if kind[1].buckets[0].exchanges]
    assert share == pytest.approx(1 / config["period"])
    exchanges = [exchange for bucket in trace.buckets for exchange in bucket.exchanges]
    assert [exchange.steps for exchange in exchanges] == [delay] * len(buckets)
    # A step that only takes what arrives is a kind of its own.
    assert len(kinds) == (2 if delay == config["period"] else 3)
    hook = commhooks.create(config)
    hook.prepare(parameters, fake_group(4))
    of_steps = range(STEP, STEP + config["period"])
    stated = [
        hook.wire_bytes(bucket_with(bucket, bucket.buffer(), step=step), 4)
        for step in of_steps
        for bucket in buckets
    ]
    assert sent(kinds, 4) * config["period"] == pytest.approx(sum(stated))


def test_a_hook_that_cannot_run_alone_is_an_error(monkeypatch):
    monkeypatch.setattr("commhooks.lab.simulation.dry_run.create", lambda config: Broken())
    buckets, parameters = make_buckets()
    with pytest.raises(CommHookError, match=r"cannot be simulated.*no GPU here"):
        DryRunner({"name": "broken"}, buckets, parameters).trace(4)


def test_gradients_are_not_changed():
    buckets, parameters = make_buckets()
    before = [bucket.buffer().clone() for bucket in buckets]
    # int8 writes to the bucket.
    DryRunner({"name": "int8"}, buckets, parameters, device=None).trace(4)
    assert all(torch.equal(b.buffer(), old) for b, old in zip(buckets, before, strict=True))
