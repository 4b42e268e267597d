"""The conformance kit accepts every hook, and names the rule that a broken hook breaks."""

import functools
import importlib
import re
import traceback
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch.distributed as dist
from support import my_hooks

import commhooks
from commhooks.costs.timeline import Timing
from commhooks.hook import registry
from commhooks.planning import Plan, Row
from commhooks.testing import check_hook, conformance
from commhooks.testing.conformance import ConformanceError
from commhooks.testing.probe import probe_parameters
from commhooks.testing.rules import RULES

# Options that make each hook active from the first step, `{}` for its defaults. Hooks that are not
# listed are checked with their defaults.
POWERSGD = {"name": "powersgd", "rank": 2, "min_compression_rate": 1.0, "start_step": 0}
# Only one hook keeps state: others would go on if its gradients are not finite.
PLANNED = {
    "matrix": "powersgd:rank=2,min_compression_rate=1.0,start_step=0",
    "convolution": "bf16",
    "odd": "fp8:error_feedback=false",
    "transposed": "powersgd:rank=2,min_compression_rate=1.0,start_step=0",
}
NO_TIME = Timing(0.0, 0.0, 0.0, 0)
PLAN = Plan(
    tuple(
        Row((name,), 0, PLANNED.get(name, "allreduce"), 1, 0.0, 0.0, 0.0, 1.0, "")
        for name in probe_parameters()
    ),
    NO_TIME,
    NO_TIME,
    error=0.1,
    limit=0.1,
    reason="by hand",
).to_json()
OPTIONS: dict[str, list[dict[str, object]]] = {
    "powersgd": [
        {"rank": 2, "min_compression_rate": 1.0, "start_step": 0},
        {"rank": 1, "min_compression_rate": 1.0, "start_step": 0, "two_sided": False},
        {"rank": 1, "min_compression_rate": 1.0, "start_step": 0, "num_iters_per_step": 2},
        {},
    ],
    "gossip": [{"what": "gradients", "average_every": 2}, {"average_every": 2}],
    "push_sum": [{"topology": "uniform"}, {}],
    "hierarchical": [
        {"inner": "allreduce", "ranks_per_node": 1},
        {"inner": POWERSGD, "ranks_per_node": 1},
    ],
    "local_sgd": [
        {"period": 1},
        {"period": 3, "start_step": 1},
    ],
    "diloco": [
        {"period": 2, "delay": 1, "fragments": 2, "inner": "int8"},
        {"period": 1, "eager": True},
        {"period": 1, "inner": POWERSGD},
    ],
    "fp8": [{}, {"format": "e5m2", "error_feedback": False}],
    "fp4": [{}, {"format": "mxfp4", "error_feedback": False}, {"format": "e3m0"}],
    "int2": [{}, {"error_feedback": False}, {"rotate": True}],
    "int4": [{}, {"stochastic": True, "error_feedback": False}, {"rotate": True}],
    "int8": [{}, {"stochastic": True, "error_feedback": False}],
    "qsgd": [{}, {"levels": 1, "norm": "l2"}],
    "signsgd": [{}, {"error_feedback": False}],
    "terngrad": [{}, {"clip": 0.0}],
    "batched_powersgd": [{"rank": 2, "min_compression_rate": 1.0, "start_step": 0}],
    "cast": [{"inner": "allreduce"}, {"inner": POWERSGD, "dtype": "float64"}],
    "error_feedback": [
        {"inner": "bf16"},
        {"inner": {"name": "cast", "inner": "allreduce"}, "decay": 0.5},
    ],
    "auto": [{"plan": PLAN}, {}],
    "guard": [
        {"inner": POWERSGD, "max_error": 2.0, "every": 1},
        {"inner": "int8", "max_error": 1e-6},  # falls back in the second step
    ],
    "route": [
        {"rules": [["*r", "allreduce"], ["m*", POWERSGD]], "default": "bf16"},
        {"rules": [["*", "allreduce"]]},
    ],
    "schedule": [
        {"stages": [[0, "allreduce"], [1, POWERSGD]]},
        {"stages": [[0, POWERSGD], [1, "bf16"]], "cycle": 5, "keep_state": False},
    ],
    "skip_nonfinite": [
        {"inner": "allreduce"},
        {"inner": POWERSGD, "whole_steps": True},
        {"inner": {"name": "route", "rules": [["m*", POWERSGD]], "default": "bf16"}},
    ],
    "demo": [{"density": 0.1, "tile": 8}, {"sign": True}],
    "dgc": [{"density": 0.1, "warmup_steps": 2, "clip": 1.0}, {}],
    "randomk": [{"density": 0.2}, {"density": 0.2, "error_feedback": True}],
    "threshold": [{"value": 0.5}, {"value": 1e9}, {"value": 0.5, "error_feedback": False}],
    "topk": [
        {"density": 0.1, "warmup_steps": 2},
        {"density": 0.5, "warmup_steps": 0, "error_feedback": False},
        {"density": 0.1, "warmup_steps": 1, "chunk": 320, "bits": 4},
        {},
    ],
    "shared_topk": [{"density": 0.1, "warmup_steps": 1}],
}
# Hooks that `make test` checks on three ranks instead of two.
ON_THREE_RANKS = {"gossip", "shared_topk", "topk"}
# Hooks whose code is that of another one, but for a number or a codec: with a memory of errors of
# int8, without one of qsgd.
VARIANTS = {"bf16", "fp4", "fp8", "int2", "int4", "natural", "onebit", "terngrad"}
OWN_HOOKS = sorted(
    name for name, kind in registry._hooks.items() if kind.__module__.startswith("commhooks.")
)


@pytest.mark.usefixtures("run_ranks")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            name,
            options,
            marks=[pytest.mark.exhaustive] if index or name in ON_THREE_RANKS | VARIANTS else [],
        )
        for name in OWN_HOOKS
        for index, options in enumerate(OPTIONS.get(name, [{}]))
    ],
)
def test_every_hook_conforms(name, options):
    check_hook(functools.partial(commhooks.create, name, **options))


@pytest.mark.usefixtures("run_ranks")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ON_THREE_RANKS else [pytest.mark.exhaustive])
        for name in sorted(OPTIONS.keys() - {"noop", "fp16", "batched_powersgd"})
    ],
)
def test_on_three_ranks(name):
    options = OPTIONS.get(name, [{}])[0]
    check_hook(functools.partial(commhooks.create, name, **options), world_size=3)


@pytest.mark.usefixtures("run_ranks")
@pytest.mark.parametrize(
    ("inner", "sharded"),
    [
        pytest.param("allreduce", True, marks=pytest.mark.exhaustive),
        pytest.param("allreduce", False, marks=pytest.mark.exhaustive),
        pytest.param("int8", True, marks=pytest.mark.exhaustive),
        pytest.param(POWERSGD, True, marks=pytest.mark.exhaustive),
        pytest.param(POWERSGD, False, marks=pytest.mark.exhaustive),
    ],
)
def test_nodes_of_two_ranks(inner, sharded):
    check_hook(functools.partial(make_nodes_of_two, inner, sharded), world_size=4)


def make_nodes_of_two(inner, sharded):
    """Make a hook for nodes of two ranks, or of one rank if the kit runs it on one rank."""
    ranks_per_node = 2 if dist.is_initialized() and dist.get_world_size() > 1 else 1
    return commhooks.create(
        "hierarchical", inner=inner, ranks_per_node=ranks_per_node, sharded=sharded
    )


# -------------------------------------------------------------------- broken hooks

BROKEN = {
    "Unregistered": "registered",
    "ChangesAnOption": "config",
    "HasNoSource": "representation",
    "ReturnsHalf": "result",
    "ReturnsTheSum": "mean",
    "IgnoresTheMemoryFormat": "mean",
    "NeedsPeers": "alone",
    "DividesByTheDeviation": "sizes",
    "DrawsFromTheGlobalGenerator": "deterministic",
    "DisagreesWithItself": "consensus",
    "DividesByTheNorm": "zeros",
    "RemembersInfinity": "non_finite",
    "LooksAtItsOwnGradient": "non_finite",
    "KeepsStateByBucket": "keys",
    "KeepsStateElsewhere": "resume",
    "SendsOnItsOwn": "wire",
    "StatesTooLittle": "cost",
    "NeedsEveryGradient": "unused",
    "CountsBeforeItSends": "failure",
    "IsSetUpByTheEngine": "nested",
    "ClaimsToHaveSentAll": "contribution",
    "TellsUnasked": "contribution",
    "NeedsOneBucketForever": "torch_ddp",
}


@pytest.fixture(scope="module")
def broken_hooks() -> Iterator[ModuleType]:
    """Register the broken hooks for this module only, so that no other test finds them by name."""
    before = dict(registry._hooks)
    yield importlib.import_module("support.broken_hooks")
    registry._hooks.clear()
    registry._hooks.update(before)


@pytest.mark.usefixtures("run_ranks")
@pytest.mark.parametrize(("name", "rule"), BROKEN.items())
def test_the_rule_finds_the_broken_hook(broken_hooks, monkeypatch, name, rule):
    monkeypatch.setattr(conformance, "RULES", {rule: RULES[rule]})
    with pytest.raises(ConformanceError, match=f"breaks the rule '{rule}'"):
        check_hook(getattr(broken_hooks, name))


@pytest.mark.usefixtures("run_ranks")
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(*case, marks=[] if case[1] == "result" else [pytest.mark.exhaustive])
        for case in BROKEN.items()
    ],
)
def test_all_rules_before_it_hold(broken_hooks, name, rule):
    with pytest.raises(ConformanceError, match=f"breaks the rule '{rule}'"):
        check_hook(getattr(broken_hooks, name))


@pytest.mark.usefixtures("run_ranks")
def test_a_failure_is_short_and_names_the_line(broken_hooks, monkeypatch):
    monkeypatch.setattr(conformance, "RULES", {"result": RULES["result"]})
    with pytest.raises(ConformanceError) as caught:
        check_hook(my_hooks.Raising)
    assert "no luck" in str(caught.value)
    assert re.search(r", at \S+my_hooks\.py:\d+ in reduce$", str(caught.value))
    monkeypatch.setattr(conformance, "RULES", {"mean": RULES["mean"]})
    with pytest.raises(ConformanceError, match=r"off by \S+, and \d+ more$"):
        check_hook(broken_hooks.ReturnsTheSum)
    shown = "".join(traceback.format_exception(caught.value))
    assert "direct cause" not in shown
    assert "During handling" not in shown
    assert len(shown.splitlines()) < 12
    hidden = caught.traceback[-1].frame.f_locals
    assert hidden["__tracebackhide__"]


def test_there_is_a_broken_hook_for_every_rule():
    assert set(BROKEN.values()) == set(RULES)


def test_a_factory_that_cannot_be_sent_raises():
    with pytest.raises(TypeError, match=r"functools\.partial"):
        check_hook(lambda: commhooks.create("allreduce"))
    with pytest.raises(
        TypeError, match=r"expected a function that makes a hook.*found AllReduce\(\)"
    ):
        check_hook(commhooks.create("allreduce"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'int'> to make a CommHook, found 0"):
        check_hook(int)  # type: ignore[arg-type]
