"""What hooks may declare and define beyond averaging, alone and inside a wrapper."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks.algorithms.wrappers.table import check_candidate, residual_of
from commhooks.hook.base import ModelInfo, prepare_all, tree
from commhooks.hook.state import StateField
from commhooks.lab.comparison.entry import Entry
from commhooks.state.entries import parts_of

PARAMETERS = {name: torch.zeros(3, requires_grad=True) for name in ("a", "b", "c")}
NO_GROUP: Any = None


@dataclass
class Plain(commhooks.CommHook):
    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


@commhooks.register_hook("test_wrapper")
@dataclass
class Wrapper(commhooks.CommHook):
    inner: commhooks.CommHook

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        return await self.inner.reduce(bucket, comm.within(self.inner))


# ----------------------------------------------------------------------------------------- flags


FLAGS = (
    "changes_parameters",
    "checks_finite",
    "gets_each_once",
    "has_exchanges",
    "is_adaptive",
    "skips_steps",
    "spreads_parameters",
    "tells_contribution",
)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags(flag: str) -> None:
    """A class attribute, or a property that depends on options."""
    always = type("Always", (Plain,), {flag: True})()
    seldom = type("Seldom", (Plain,), {flag: property(lambda self: self.is_on)})
    on, off = seldom(), seldom()
    on.is_on, off.is_on = True, False
    for hook, expected in ((Plain(), False), (always, True), (on, True), (off, False)):
        assert getattr(hook, flag) == expected
        wrapped = tree(Wrapper(Wrapper(hook)))
        assert [getattr(each, flag) for each in wrapped] == [False, False, expected]


@pytest.mark.parametrize(
    ("inner", "problem"),
    [
        ({"name": "gossip", "what": "parameters"}, "does not return the same"),
        ("skip_nonfinite", "skips steps"),
        ({"name": "hierarchical", "ranks_per_node": 1}, "keeps state of other parameters"),
    ],
)
def test_candidates_are_checked_inside_wrappers(inner: Any, problem: str) -> None:
    if inner == "skip_nonfinite":
        inner = {"name": inner, "inner": "allreduce"}
    with pytest.raises(commhooks.CommHookOptionError, match=problem):
        check_candidate(Wrapper(commhooks.create(inner)), "here")


def test_wrappers_are_asked_about_exchanges_and_changed_parameters() -> None:
    delayed = Wrapper(commhooks.create("diloco", delay=1))
    with pytest.raises(commhooks.CommHookOptionError, match=r"'whole_steps'.*exchanges"):
        commhooks.create("skip_nonfinite", inner=delayed, whole_steps=True)
    with pytest.raises(commhooks.CommHookOptionError, match="changes parameters"):
        commhooks.create("hierarchical", inner=delayed)
    assert Entry("", Wrapper(commhooks.create("local_sgd")).to_config()).changes_parameters
    assert not Entry("", Wrapper(commhooks.create("bf16")).to_config()).changes_parameters


def test_a_contribution_is_asked_of_all_hooks() -> None:
    with pytest.raises(commhooks.CommHookOptionError, match=r"contribution.*Wrapper"):
        commhooks.create("error_feedback", inner=Wrapper(commhooks.create("bf16")))
    stages = [[0, Wrapper(commhooks.create("bf16"))]]
    with pytest.raises(commhooks.CommHookOptionError, match=r"contribution.*Wrapper"):
        commhooks.create("error_feedback", inner=commhooks.create("schedule", stages=stages))


def test_only_the_registered_hook_checks_whether_numbers_are_finite() -> None:
    checking = commhooks.create("skip_nonfinite", inner="allreduce")
    assert commhooks.create("schedule", stages=[[0, checking]]).checks_finite
    assert not commhooks.create("schedule", stages=[[0, Wrapper(checking)]]).checks_finite


# --------------------------------------------------------------------------------------- methods


@dataclass
class Divided(Plain):
    """Has a key for each parameter, and state for buckets and of its rank alone."""

    def bucket_key(self, parameter: str) -> Hashable:
        return parameter

    def bucket_fields(self) -> Sequence[StateField]:
        return (StateField("sum", "same", ()),)

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        error = StateField.like(gradient, "error", "averageable")
        return error, StateField.like(gradient, "rest", "own")


@dataclass
class Keeping(Divided):
    def keep_own(self, mean: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        mean["error"] += own["rest"]


def test_keys_of_buckets() -> None:
    assert Plain().bucket_key("a") == ()
    assert Divided().bucket_key("a") == "a"
    assert Wrapper(Wrapper(Divided())).bucket_key("a") == (("a",),)
    apart = commhooks.create("route", rules=[["a", Wrapper(Divided())]], default="bf16")
    apart.prepare(PARAMETERS, NO_GROUP)
    assert [apart.bucket_key(name) for name in "abc"] == [(0, ("a",)), (1, ()), (1, ())]


def test_parameters_of_nested_hooks() -> None:
    inner = commhooks.create("route", rules=[["a", Divided()]], default=Plain())
    outer = Wrapper(inner)
    assert outer.nested_parameters(PARAMETERS) == {"inner": PARAMETERS}
    prepare_all(outer, PARAMETERS, NO_GROUP)
    parts = {part.path: set(part.gradients) for part in parts_of({}, outer, PARAMETERS)}
    assert parts == {
        (): {"a", "b", "c"},
        (".inner",): {"a", "b", "c"},
        (".inner", ".rules.0.1"): {"a"},
        (".inner", ".default"): {"b", "c"},
    }


def test_state_of_buckets() -> None:
    key = "0123456789abcdef"
    saved = {".inner": {key: {"sum": torch.zeros(())}}}
    of_divided = list(parts_of(saved, Wrapper(Divided()), PARAMETERS))[1]
    of_divided.check()
    of_plain = list(parts_of(saved, Wrapper(Plain()), PARAMETERS))[1]
    with pytest.raises(commhooks.CommHookStateError, match=f"at '.inner', '{key}'"):
        of_plain.check()


def test_extra_state_of_nested_hooks() -> None:
    inner, again = Plain(), Plain()
    inner.extra_state = {"plan": [1, {"a": None}], "since": 3}
    saved = Wrapper(Wrapper(inner)).state_dict()
    assert saved == {
        ".inner": {".inner": {".extra_state": {"plan": '[1, {"a": null}]', "since": "3"}}}
    }
    Wrapper(Wrapper(again)).load_state_dict(saved)
    assert again.extra_state == inner.extra_state
    Wrapper(Wrapper(again)).load_state_dict({})
    assert again.extra_state == {}


@pytest.mark.parametrize(("kind", "expected"), [(Divided, 1.0), (Keeping, 1.0 + 2 * 4.0)])
def test_own_fields_count_if_the_hook_keeps_them(kind: type[Divided], expected: float) -> None:
    hook = kind()
    hook.state["a"] = {"error": torch.ones(3), "rest": torch.full((3,), 4.0)}
    residual = residual_of(Wrapper(hook), "a", PARAMETERS["a"], 2)
    assert residual is not None
    assert residual.tolist() == [expected] * 3


def find_native(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    assert commhooks.create("allreduce").native(group) is not None
    assert Plain().native(group) is None
    assert Wrapper(commhooks.create("allreduce")).native(group) is None


def test_a_wrapper_is_not_native(run_ranks: Any) -> None:
    run_ranks(find_native, 1)


@dataclass
class Theatre(Plain):
    """Has options that are called as what other hooks know of the model."""

    roles: str = "Hamlet"
    units: str = "Globe"


def test_knowledge_of_the_model() -> None:
    plain, theatre = Plain(), Theatre()
    assert plain.model_info == ModelInfo(None, None)
    for hook in (plain, theatre):
        info = ModelInfo({"a": "output"}, [["a"], ["b", "c"]])
        prepare_all(Wrapper(Wrapper(hook)), PARAMETERS, NO_GROUP, info)
        assert hook.model_info == info
    assert plain == Plain()
    assert (theatre.roles, theatre.units) == ("Hamlet", "Globe")


@dataclass
class Rounds(Plain):
    two: bool = False

    @property
    def rounds(self) -> int:
        return 2 if self.two else 1


def test_rounds_are_the_collectives_of_all_ranks() -> None:
    """Wrappers await the most of their hooks."""
    assert Plain().collectives(0, 4) == {(): 1}
    assert Wrapper(Rounds(two=True)).collectives(0, 4) == {(): 2}
    assert commhooks.create("noop").collectives(0, 4) == {}
    assert Wrapper(commhooks.create("noop")).collectives(0, 4) == {(): 1}
    both = commhooks.create("route", rules=[["a", Rounds()]], default=Rounds(two=True))
    assert both.collectives(0, 4) == {(): 2}


# ---------------------------------------------------------------------------------------- misuse


def option(name: str, kind: Any, **default: Any) -> None:
    namespace = {"__annotations__": {name: kind}, **default}
    dataclass(type("Option", (Plain,), namespace))


@pytest.mark.parametrize(
    ("name", "define"),
    [
        ("skips_steps", partial(type, "Number", (Plain,), {"skips_steps": 3})),
        ("has_exchanges", partial(type, "Method", (Plain,), {"has_exchanges": lambda _: True})),
        ("checks_finite", partial(option, "checks_finite", int)),
        ("checks_finite", partial(option, "checks_finite", "str", checks_finite="x")),
        (
            "changes_parameters",
            partial(option, "changes_parameters", bool, changes_parameters=field(default=True)),
        ),
        ("changes_parameters", partial(option, "changes_parameters", bool)),
        ("capturable_from", partial(type, "Text", (Plain,), {"capturable_from": "now"})),
        ("model_info", partial(option, "model_info", str, model_info="x")),
        ("extra_state", partial(option, "extra_state", str, extra_state="x")),
        ("state", partial(option, "state", str, state="x")),
        ("caches", partial(option, "caches", str, caches="x")),
        ("prepare", partial(type, "Value", (Plain,), {"prepare": 3})),
        ("native", partial(type, "Flag", (Plain,), {"native": True})),
        ("bucket_key", partial(option, "bucket_key", str)),
        ("notes", partial(option, "notes", str)),
        ("keep_own", partial(option, "keep_own", bool, keep_own=True)),
    ],
)
def test_other_uses_of_the_names_are_refused(name: str, define: Any) -> None:
    with pytest.raises(commhooks.CommHookError, match=rf"\.{name}: expected .*a meaning for all"):
        define()


def test_flags_may_be_options() -> None:
    option("changes_parameters", bool, changes_parameters=False)
    option("changes_parameters", "ClassVar[bool]", changes_parameters=True)
