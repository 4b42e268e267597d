"""Auto: plans, what they are made of, and that all ranks have the same."""

import json
import math
import time
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import sharded
from torch import Tensor

import commhooks
from commhooks.algorithms import Auto
from commhooks.algorithms.adaptive import measurement, planner
from commhooks.algorithms.adaptive.link import UNKNOWN, Probe
from commhooks.algorithms.adaptive.planner import AgreedState
from commhooks.algorithms.wrappers.timing import HookTiming
from commhooks.algorithms.wrappers.trial import relative_error
from commhooks.costs.timeline import Timing
from commhooks.hook.base import tree
from commhooks.hook.spec import hook_spec
from commhooks.planning import GroupPlan, Plan
from commhooks.testing.compare import disagreement, same_bits, through_file
from commhooks.testing.probe import Trainer, draw_gradients

SHAPES: dict[str, tuple[int, ...]] = {"a": (96, 64), "b": (64, 96), "bias": (64,), "c": (48, 64)}
PARAMETERS = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
CANDIDATES = ["bf16", "int8", "int4", "powersgd:rank=4,start_step=0", "topk:density=0.1"]
SLOW, FAST = Probe(1e-5, 1e-5, 0.0), Probe(1e-9, 1e-13, 0.0)
"""The links of two villages, and of one chip."""


def plan_of(hooks: dict[str, str]) -> Plan:
    timing = Timing(0.0, 0.0, 0.0, 0)
    rows = tuple(GroupPlan((n,), 0, hook, 1, 0.0, 0.0, 0.1, 1.0, "") for n, hook in hooks.items())
    return Plan(rows, timing, timing, 0.1, 0.2, "by hand")


# -------------------------------------------------------------------------------------- options


def test_config_and_equality() -> None:
    hook = Auto(error=0.05, candidates=["bf16", "powersgd:rank=4"])  # type: ignore[list-item]
    assert hook.candidates == [commhooks.create("bf16"), commhooks.create("powersgd", rank=4)]
    assert commhooks.create(json.loads(json.dumps(hook.to_config()))) == hook
    assert hook != Auto(error=0.06, candidates=hook.candidates)


def test_representation_has_the_plan_that_was_given() -> None:
    hook = commhooks.create("guard", inner=Auto(plan=plan_of({"a": "bf16"})), max_error=0.1)
    kinds = {type(each).__name__: type(each) for each in tree(hook)}
    found = eval(repr(hook), kinds)
    assert found.to_config() == hook.to_config()
    made = Auto()
    made.plan = plan_of({"a": "bf16"})
    assert "plan=None" in repr(made)


def test_a_fixed_plan_is_in_the_config(tmp_path: Any) -> None:
    plan = plan_of({"a": "int4", "b": "powersgd:rank=2", "c": "allreduce"})
    plan.save(tmp_path / "plan.json")
    hook: Any = commhooks.create("auto", plan=str(tmp_path / "plan.json"))
    (tmp_path / "plan.json").unlink()
    again: Any = commhooks.create(json.loads(json.dumps(hook.to_config())))
    assert again == hook
    assert again.plan == plan
    assert [each.name for each in hook.candidates] == ["int4", "powersgd", "allreduce"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ["int8", "local_sgd"]}, r"'candidates\.1'.*not return the same"),
        ({"candidates": ["gossip"]}, r"'candidates\.0'.*not return the same on all ranks"),
        ({"candidates": [{"name": "skip_nonfinite"}]}, "skips steps"),
        ({"candidates": ["int8", "powersgd:rank=0"]}, r"^candidates\.1: hook 'powersgd:rank=0'"),
        ({"error": {"name": "gossip"}}, "'error'.*not return the same"),
        ({"error": -0.1}, "'error'.*found -0.1 .*not >= 0"),
        ({"error": math.nan}, "'error'.*found nan .*not >= 0"),
        ({"exact": ["@nose"]}, "option 'exact.0' of hook 'auto'.*one of the roles"),
        ({"plan": "/nowhere/plan.json"}, "'plan'.*/nowhere/plan.json"),
        ({"plan": {"rows": 3}}, "'plan'.*commhooks plan --save"),
        ({"plan": plan_of({"a": "int5"}).to_json()}, "'plan'.*no hook is named 'int5'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(commhooks.CommHookError, match=message):
        commhooks.create("auto", **options)


# ---------------------------------------------------------------------------------- on two ranks


def fixed_seconds(run: HookTiming) -> tuple[float, ...]:
    return 1e-4, *(0.0 for _ in run.collectives)


class Links:
    """Replaces what this machine's times set: the link, local costs and the pace."""

    def __init__(self, stack: ExitStack) -> None:
        self.probe = SLOW
        stack.enter_context(patch.object(planner, "link_of", lambda *_: self.probe))
        stack.enter_context(patch.object(planner, "_SHARE", 1e9))
        stack.enter_context(patch.object(planner, "_NATIVE_CHECK", 10))
        stack.enter_context(patch.object(HookTiming, "local_seconds", property(fixed_seconds)))


def train(trainer: Trainer, rank: int, steps: range, *, scale: float = 1.0) -> dict[str, Tensor]:
    """Train with gradients of low rank and some noise; one rank is slower than the other."""
    found: dict[str, Tensor] = {}
    for step in steps:
        time.sleep(0.002 * rank * (step % 3))
        gradients = {
            name: scale * (g.sum(0, keepdim=True) + 0.1 * g)
            for name, g in draw_gradients(trainer.parameters, rank, step).items()
        }
        gradients = {n: g.expand(SHAPES[n]).contiguous() for n, g in gradients.items()}
        found = trainer.step(gradients)
    return found


def agreed_of(hook: Any) -> AgreedState | None:
    """What ranks have agreed on, if they measure."""
    found: AgreedState = hook._measuring.agreed
    return None if found.start is None else found


def agree(hook: Any) -> Plan:
    """Check that all ranks have agreed on the same; return the plan."""
    own = hook.plan.to_json(), hook.history, agreed_of(hook), hook._table.table
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, own)
    assert all(other == own for other in others)
    return hook.plan


def adapt(rank: int, size: int, torch_ddp: bool, device: str = "cpu") -> None:
    parameters = {name: zeros.to(device) for name, zeros in PARAMETERS.items()}
    with ExitStack() as stack:
        links = Links(stack)
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, parameters, torch_ddp=torch_ddp, bucket_cap_mb=0.02)
        assert "nothing has been measured" in hook.plan.reason
        train(trainer, rank, range(30))
        plan = agree(hook)
        step, note = hook.notes()[0]
        assert step == hook.history[0].step
        assert "the first plan. 3 parameters change their hook" in note
        assert hook.history[0].reason == "the first plan"
        assert hook.history[0].step <= 18 or device != "cpu"
        assert set(plan.hook_of()) == set(SHAPES)
        assert plan.hook_of()["bias"] == "allreduce"
        assert set(plan.hook_of().values()) > {"allreduce"}
        assert 0 < plan.error <= plan.limit == 0.3
        metrics = trainer.handle.stats().metrics
        assert metrics["limit"] == 0.3
        assert metrics["plans"] >= 1
        assert metrics["step_seconds"] > 0
        assert 0 < metrics["planning_share"] < 1
        assert metrics["link_megabits_per_second"] == pytest.approx(0.8)

        # A resumed run goes on with the same plan, on all ranks, and with what it knows.
        saved = through_file(trainer.handle.state_dict())
        resumed: Any = commhooks.create(hook.to_config())
        other = Trainer(resumed, parameters, torch_ddp=torch_ddp, bucket_cap_mb=0.02)
        other.handle.load_state_dict(saved)
        assert agree(resumed) == plan
        assert resumed.history == hook.history
        train(other, rank, range(30, 34))
        assert agree(resumed) == plan
        assert resumed._table.table == hook._table.table

        # A faster link, on which nothing is worth an error: all return to plain averages.
        links.probe = FAST
        found = train(trainer, rank, range(30, 90))
        plan = agree(hook)
        assert set(plan.hook_of().values()) == {"allreduce"}
        assert any("the link changed" in decision.reason for decision in hook.history)
        assert not disagreement(found)


@pytest.mark.parametrize("torch_ddp", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_plan_follows_the_link(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(adapt, 2, torch_ddp)


def reconsider(rank: int, size: int) -> None:
    with ExitStack() as stack:
        Links(stack)
        hook: Any = commhooks.create("auto", candidates=CANDIDATES, replan=60)
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        train(trainer, rank, range(30))
        plan = agree(hook)
        assert 0.01 < plan.limit < 0.5  # the error of int4
        train(trainer, rank, range(30, 110))
        agree(hook)
        assert any("60 steps since" in decision.reason for decision in hook.history)

        # Errors far beyond the limit: the next check leaves the plan.
        own = hook._measuring._planner
        own.limit = 1e-4
        train(trainer, rank, range(110, 135))
        assert set(agree(hook).hook_of().values()) == {"allreduce"}
        assert any("the error of the plan is" in decision.reason for decision in hook.history)


def test_reasons_for_new_plans(run_ranks: Any) -> None:
    run_ranks(reconsider, 2)


def low_rank_gradients(step: int) -> dict[str, Tensor]:
    """Gradients with another subspace of rank 2 in each step, the same on all ranks."""
    random = torch.Generator().manual_seed(step)

    def draw(shape: tuple[int, ...]) -> Tensor:
        columns = torch.randn(math.prod(shape[:-1]), 2, generator=random)
        return (columns @ torch.randn(2, shape[-1], generator=random)).view(shape)

    return {name: draw(shape) for name, shape in SHAPES.items()}


def compare_errors(rank: int, size: int) -> None:
    """A step shows the error of a hook with the factors and errors of many steps."""
    with ExitStack() as stack:
        Links(stack)
        stack.enter_context(patch.object(measurement, "_CHECKED", 1 << 20))  # all of them
        low_rank = "powersgd:rank=2,start_step=0"
        hook: Any = commhooks.create("auto", error=9.0, candidates=[low_rank])
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        checked = 0
        for step in range(60):
            gradients = low_rank_gradients(step)
            rests = {name: hook._table.residual(size, name, g) for name, g in gradients.items()}
            found = trainer.step(gradients)
            measured = hook._measuring
            if not (agreed := agreed_of(hook)) or not agreed.is_check(step):
                continue
            for (i, _), measured_error in measured.report().errors.items():
                wrong = right = 0.0
                for name in measured._planner.groups[i].names:
                    rest = rests[name]
                    p = gradients[name].clone()
                    if rest is not None:
                        p += rest.view(SHAPES[name])
                    dist.all_reduce(p.div_(size))
                    wrong += float((found[name] - p).square().sum())
                    right += float(p.square().sum())
                error = relative_error(wrong, right)
                assert measured_error == pytest.approx(error, rel=1e-3, abs=1e-4)
                checked += error > 0.6
        assert checked >= 4
        assert hook.metrics()["error"] > 0.6  # more than in trials


def test_errors_are_those_of_hooks_in_use(run_ranks: Any) -> None:
    run_ranks(compare_errors, 2)


def decide_alone(rank: int, size: int) -> None:
    with ExitStack() as stack:
        links = Links(stack)
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        links.probe = Probe(1e-5, 1e-5 * (1 + 5 * rank), 0.0)  # ranks derive other problems
        if rank == 1:
            solver = stack.enter_context(patch.object(planner, "solve"))
            solver.return_value = plan_of(dict.fromkeys(SHAPES, "bf16"))
        train(trainer, rank, range(60))
        assert len(set(agree(hook).hook_of().values())) > 1
        assert {each.byte_seconds for each in hook.history} == {1e-5}  # the link of rank 0


def test_all_ranks_follow_rank_0(run_ranks: Any) -> None:
    """Whatever they would derive themselves."""
    run_ranks(decide_alone, 2)


def fail_and_recover(rank: int, size: int) -> None:
    """A step fails on one rank, at each stage of measuring; the next steps are right on all."""
    with ExitStack() as stack:
        Links(stack)
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        for step in range(40):
            # Trials, reports, proposals and plans; inside of the hook, and before it has begun.
            for target in ((hook._table, "run"), (hook, "reduce")) if step % 8 < 4 else ():
                broken = patch.object(*target, fail) if rank == step % 2 else ExitStack()
                with broken, pytest.raises(commhooks.CommHookError):
                    train(trainer, rank, range(step, step + 1))
            found = train(trainer, rank, range(step, step + 1))
            assert not disagreement(found)
            agree(hook)
        assert set(agree(hook).hook_of().values()) > {"allreduce"}


def test_failed_steps_leave_the_same_plan_on_all_ranks(run_ranks: Any) -> None:
    run_ranks(fail_and_recover, 2)


def begin_without_numbers(rank: int, size: int) -> None:
    with ExitStack() as stack:
        Links(stack)
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        for _ in range(4):
            trainer.step({name: torch.full_like(p, math.nan) for name, p in PARAMETERS.items()})
        assert not hook.history
        train(trainer, rank, range(4, 20))
        assert set(agree(hook).hook_of().values()) > {"allreduce"}


def test_there_is_no_plan_until_a_trial_has_succeeded(run_ranks: Any) -> None:
    run_ranks(begin_without_numbers, 2)


async def fail(*_: object) -> Tensor:
    raise ValueError("by the test")


def send_all(rank: int, size: int) -> None:
    """What one hook has not sent, the next one sends: averages add up to the exact ones."""
    order = ["int4", "powersgd:rank=2,start_step=0", "topk:density=0.1,warmup_steps=0", "onebit"]
    order += [
        "powersgd:rank=4,start_step=0",
        "error_feedback:inner=(int8:error_feedback=false)",
        "allreduce",
    ]
    hook = Auto(plan=plan_of(dict.fromkeys(SHAPES, order[0])))
    hooks = [hook_spec(spec).create() for spec in order]
    hook._table._hooks = [hooks[-1], *hooks[:-1]]
    trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.03)
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    exact = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(4 * len(order)):
        turn = step // 4
        table = {
            name: (turn + i) % len(order) if turn < len(order) - 1 else 0
            for i, name in enumerate(SHAPES)
        }
        hook._table.change(table)
        if step == 6:  # nothing is lost by a failed step
            reductions = [each.reduce for each in hook._table._hooks]
            for each in hook._table._hooks:
                each.reduce = fail  # type: ignore[method-assign]
            with pytest.raises(commhooks.CommHookError):
                trainer.step(draw_gradients(PARAMETERS, rank, step))
            for each, reduction in zip(hook._table._hooks, reductions, strict=True):
                each.reduce = reduction  # type: ignore[method-assign]
        found = trainer.step(draw_gradients(PARAMETERS, rank, step))
        for name in SHAPES:
            sums[name] += found[name]
            for peer in range(size):
                exact[name] += draw_gradients(PARAMETERS, peer, step)[name].double() / size
    for name in SHAPES:
        error = (sums[name] - exact[name]).norm() / exact[name].norm()
        assert error < 1e-5, (name, error)
    assert not any(each.state for each in hook._table._hooks[1:])


def test_residuals_follow_a_parameter_to_its_next_hook(run_ranks: Any) -> None:
    run_ranks(send_all, 2)


def resume_fixed(rank: int, size: int) -> None:
    """With a fixed plan nothing is measured, and a resumed run has the same bits."""
    options = {
        "plan": plan_of({"a": "int4", "b": "powersgd:rank=2", "bias": "allreduce", "c": "bf16"})
    }
    first = Trainer(commhooks.create("auto", **options), PARAMETERS, bucket_cap_mb=0.02)
    train(first, rank, range(4))
    saved = through_file(first.handle.state_dict())
    again: Any = commhooks.create("auto", **options)
    resumed = Trainer(again, PARAMETERS, bucket_cap_mb=0.02)
    resumed.handle.load_state_dict(saved)
    for step in range(4, 30):
        found = [train(each, rank, range(step, step + 1)) for each in (first, resumed)]
        assert same_bits(*found), step
    assert again._measuring is None
    assert again.metrics() == {}
    assert set(again.plan.hook_of().values()) == {"int4", "powersgd:rank=2", "allreduce", "bf16"}


def test_a_resumed_run_with_a_fixed_plan_has_the_same_bits(run_ranks: Any) -> None:
    run_ranks(resume_fixed, 2)


# --------------------------------------------------------------------------- a plan of one hook


def bytes_so_far(trainer: Trainer) -> float:
    stats = trainer.handle.stats()
    return stats.steps * (stats.total.wire_bytes or 0)


def run_in_cpp(rank: int, size: int) -> None:
    """Buckets pass auto only in the steps that measure."""
    calls: list[int] = []
    with ExitStack() as stack:
        links = Links(stack)
        links.probe = FAST
        hook: Any = commhooks.create("auto", error=0.3, candidates=["int4"], replan=30)
        reduce = hook.reduce

        async def noted(bucket: Any, comm: Any) -> Tensor:
            calls.append(bucket.step)
            result: Tensor = await reduce(bucket, comm)
            return result

        hook.reduce = noted
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        plain = Trainer(commhooks.create("allreduce"), PARAMETERS, bucket_cap_mb=0.02)
        for step in range(60):
            found, expected = (
                train(each, rank, range(step, step + 1)) for each in (trainer, plain)
            )
            assert same_bits(found, expected), step
            if step == 49:
                before = bytes_so_far(trainer)
        assert "a hook that sends nothing saves" in agree(hook).reason
        assert len(set(calls)) <= 22
        assert trainer.handle.stats().steps > 50
        # The measurements of the first steps count, too.
        per_step = bytes_so_far(plain) / plain.handle.stats().steps
        assert bytes_so_far(trainer) - before == pytest.approx(10 * per_step)
        # It still sees that the link has changed, and residuals are sent before others take over.
        links.probe = SLOW
        train(trainer, rank, range(60, 110))
        assert set(agree(hook).hook_of().values()) == {"allreduce", "int4"}


def test_a_plan_of_one_hook_is_that_hook(run_ranks: Any) -> None:
    run_ranks(run_in_cpp, 2)


def run_fixed_in_cpp(rank: int, size: int) -> None:
    plan = plan_of(dict.fromkeys(SHAPES, "bf16"))
    fixed = Trainer(commhooks.create("auto", plan=plan), PARAMETERS, bucket_cap_mb=0.02)
    alone = Trainer(commhooks.create("bf16"), PARAMETERS, bucket_cap_mb=0.02)
    with patch.object(Auto, "reduce", fail):
        for step in range(5):
            found, expected = (train(each, rank, range(step, step + 1)) for each in (fixed, alone))
            assert same_bits(found, expected), step


def test_a_fixed_plan_of_one_hook_is_that_hook(run_ranks: Any) -> None:
    run_ranks(run_fixed_in_cpp, 2)


# ------------------------------------------------------------------------ other ways of training


def in_columns(rank: int, size: int) -> None:
    """On FSDP2, the replicas of a shard decide together; other columns may decide otherwise."""
    with ExitStack() as stack:
        Links(stack).probe = Probe(1e-9, 1e-3, 0.0)  # the net is tiny
        mesh = sharded.mesh_of(2, 2)
        net = sharded.build(mesh)
        handle = commhooks.register(net, "auto", error=0.3, candidates=["bf16", "int8"])
        hook: Any = handle.hook
        sharded.train(net, rank, 25)
        tables: list[Any] = [None, None]
        replicas = mesh.get_group("replicate")
        own = hook._table.table, hook.plan.to_json()
        dist.all_gather_object(tables, own, group=replicas)
        assert tables == [own, own]
        assert set(hook._table.table.values()) > {0}
        before = handle.state_dict()
        other: Any = handle.hook
        handle.load_state_dict(before)
        sharded.train(net, rank, 2)
        assert other._table.table == own[0]


@pytest.mark.exhaustive
def test_on_fsdp(run_ranks: Any) -> None:
    run_ranks(in_columns, 4)


def uneven(rank: int, size: int, in_cpp: bool) -> None:
    """Ranks without inputs shadow the others; accumulation; parameters that nobody uses."""
    with ExitStack() as stack:
        if in_cpp:
            Links(stack).probe = FAST
        else:
            Links(stack)
        hook: Any = commhooks.create("auto", error=0.3, candidates=["bf16", "int8"])
        trainer = Trainer(hook, PARAMETERS, find_unused_parameters=True, bucket_cap_mb=0.02)
        used = {name: PARAMETERS[name] for name in ("a", "b", "bias")}
        with trainer.model.join():
            for step in range(20 + 20 * rank):
                drawn = [draw_gradients(used, rank, step, i) for i in range(2)]
                trainer.step(drawn[0], before=drawn[1:])
        agree(hook)
        assert (set(hook._table.table.values()) == {0}) == in_cpp
        train(trainer, rank, range(40, 60))
        agree(hook)


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_cpp", [False, True])
def test_uneven_inputs_and_unused_parameters(run_ranks: Any, in_cpp: bool) -> None:
    run_ranks(uneven, 2, in_cpp)


# ------------------------------------------------------------------------- nothing to choose from


def choose_nothing(rank: int, size: int) -> None:
    with ExitStack() as stack:
        links = Links(stack)
        cases: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
            ({"error": 1e-6, "candidates": ["int4"]}, PARAMETERS, "keeps the error within"),
            ({"candidates": ["allreduce"], "error": 0.1}, PARAMETERS, "no other candidate"),
            ({"exact": ["*"]}, PARAMETERS, "no other candidate"),
            ({"error": 0.1}, {"bias": torch.zeros(5)}, "no other candidate"),
        ]
        for options, parameters, reason in cases:
            hook: Any = commhooks.create("auto", **options)
            trainer = Trainer(hook, parameters)
            for step in range(30):
                trainer.step(draw_gradients(parameters, rank, step))
            assert set(hook._table.table.values()) == {0}, options
            assert reason in hook.plan.reason, (options, hook.plan.reason)
        links.probe = UNKNOWN
        hook = commhooks.create("auto", candidates=["int4"])
        trainer = Trainer(hook, PARAMETERS)
        train(trainer, rank, range(20))
        assert "nothing has been measured" in hook.plan.reason

        names = [(dict.fromkeys([*SHAPES, "no"], "int4"), "the model has no parameter 'no'")]
        names += [({"a": "int4"}, "the plan has no parameter 'b' and 2 more")]
        for hooks, message in names:
            with pytest.raises(commhooks.CommHookError, match=message):
                Trainer(commhooks.create("auto", plan=plan_of(hooks)), PARAMETERS)
        with pytest.raises(commhooks.CommHookError, match="rank of at most"):
            Trainer(commhooks.create("auto", candidates=["powersgd:rank=60"]), PARAMETERS)


def test_it_says_so_and_averages_exactly(run_ranks: Any) -> None:
    run_ranks(choose_nothing, 2)


def alone(rank: int, size: int) -> None:
    hook: Any = commhooks.create("auto")
    trainer = Trainer(hook, PARAMETERS)
    train(trainer, rank, range(20))
    assert "there is one rank" in str(hook.plan)
    assert hook.history == []


def test_on_one_rank(run_ranks: Any) -> None:
    run_ranks(alone, 1)


def fail_in_the_first_step_of_a_plan(rank: int, size: int) -> None:
    """Rank 0 has sent the residuals of a bucket in the step that fails, rank 1 in the next one."""
    failed: list[int] = []
    with ExitStack() as stack:
        links = Links(stack)
        hook: Any = commhooks.create("auto", error=0.3, candidates=["int4"], replan=30)
        trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=0.02)
        exact = hook._table._hooks[0]
        reduce = exact.reduce

        async def reduce_and_fail(bucket: Any, comm: Any) -> Tensor:
            average: Tensor = await reduce(bucket, comm)
            is_new = hook._measuring._followed == bucket.step
            if links.probe is FAST and bucket.is_last() and is_new:
                failed.append(bucket.step)
                if rank == 1 and len(failed) == 1:
                    raise ValueError("by the test")
            return average

        exact.reduce = reduce_and_fail
        for step in range(60):
            if step == 40:
                assert set(agree(hook).hook_of().values()) == {"allreduce", "int4"}
                links.probe = FAST
            with suppress(commhooks.CommHookError):
                train(trainer, rank, range(step, step + 1))
        assert failed[0] == failed[1]  # when it is repeated
        assert set(agree(hook).hook_of().values()) == {"allreduce"}
        assert trainer.model.reducer.steps == 59


def test_ranks_go_on_in_cpp_in_the_same_step(run_ranks: Any) -> None:
    run_ranks(fail_in_the_first_step_of_a_plan, 2)
