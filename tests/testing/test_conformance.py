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
from support.conforming_hooks import OPTIONS, OWN_HOOKS, POWERSGD

import commhooks
from commhooks.hook import registry
from commhooks.testing import check_hook, conformance
from commhooks.testing.conformance import ConformanceError
from commhooks.testing.rules import RULES

# Hooks that `make test` checks on three ranks instead of two.
ON_THREE_RANKS = {"gossip", "shared_topk", "topk"}
# Hooks whose code is that of another one, but for a number or a codec: with a memory of errors of
# int8, without one of qsgd.
VARIANTS = {"bf16", "fp4", "fp8", "int2", "int4", "natural", "onebit", "terngrad"}


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


def test_the_place_of_an_error_may_be_beside_the_framework() -> None:
    """Such as a package whose name begins with that of this one."""
    error = ValueError("broken")
    folder = conformance._FRAMEWORK[0].rstrip("/")
    error.add_note(f'File "{folder}_mine/hooks.py", line 3, in reduce\n')
    error.add_note(f'File "{folder}/runtime/execution.py", line 5, in step\n')
    assert conformance._place(error) == f", at {folder}_mine/hooks.py:3 in reduce"


@pytest.mark.usefixtures("run_ranks")
def test_on_one_rank() -> None:
    for name in ("allreduce", "int8"):
        check_hook(functools.partial(commhooks.create, name), world_size=1)
    with pytest.raises(ValueError, match="world_size of at least 1, found 0"):
        check_hook(functools.partial(commhooks.create, "int8"), world_size=0)


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
