"""Hooks by name: created, listed, described, and provided by other packages."""

import copy
import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks.hook import registry
from commhooks.hook.options import Limits
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients

NAMES = [
    "allreduce",
    "batched_powersgd",
    "bf16",
    "diloco",
    "fp16",
    "gossip",
    "local_sgd",
    "noop",
    "powersgd",
    "push_sum",
]


@pytest.fixture(autouse=True)
def _registry_restored() -> Iterator[None]:
    before = dict(registry._hooks)
    yield
    registry._hooks.clear()
    registry._hooks.update(before)


def define(name: str, *, override: bool = False) -> type[commhooks.CommHook]:
    @commhooks.register_hook(name, override=override)
    @dataclass
    class Sparse(commhooks.CommHook):
        """Send a few.

        And more text.
        """

        density: Annotated[float, Limits(ge=0.0, le=1.0)]
        seed: int = 7

        paper = "https://example.org/sparse"

        async def reduce(
            self, bucket: commhooks.GradBucket, comm: commhooks.Communicator
        ) -> Tensor:
            return await comm.all_reduce(bucket.buffer())

    return Sparse


def test_available_lists_the_hooks_of_this_package() -> None:
    assert set(NAMES) <= set(commhooks.available())
    assert commhooks.available() == sorted(commhooks.available())


@pytest.mark.parametrize("name", NAMES)
def test_every_hook_is_described_and_survives_json(name: str) -> None:
    info = commhooks.describe(name)
    assert info.name == name
    assert info.summary.endswith(".")
    assert info.wire
    assert name in str(info)
    hook = commhooks.create(name)
    assert hook.name == name
    assert commhooks.create(json.loads(json.dumps(hook.to_config()))) == hook


def test_description() -> None:
    define("sparse")
    info = commhooks.describe("sparse")
    assert info.summary == "Send a few."
    assert info.paper == "https://example.org/sparse"
    assert not info.lossless
    density, seed = info.options
    assert (density.name, density.type, density.required) == ("density", "float", True)
    assert density.constraints == (">= 0", "<= 1")
    assert (seed.name, seed.type, seed.default, seed.required) == ("seed", "int", 7, False)
    assert str(info).splitlines()[-1].strip() == info.paper


def test_unknown_name_lists_all_and_the_nearest() -> None:
    with pytest.raises(commhooks.UnknownHookError, match=r"did you mean 'powersgd'\?.*allreduce, "):
        commhooks.create("power_sgd")
    with pytest.raises(commhooks.UnknownHookError, match="did you mean 'int8'"):
        commhooks.create("INT8")
    with pytest.raises(LookupError):
        commhooks.describe("")


def test_a_spec_of_the_command_line_is_no_name() -> None:
    remedy = (
        "^expected the name of a hook, found 'powersgd:rank=4,seed=1'; options are arguments: "
        r"create\('powersgd', rank=\.\.\., seed=\.\.\.\)"
    )
    with pytest.raises(commhooks.UnknownHookError, match=remedy):
        commhooks.create("powersgd:rank=4,seed=1")


@pytest.mark.parametrize("hook", [None, 3, commhooks.create("allreduce")])
def test_what_is_no_name_is_rejected(hook: Any) -> None:
    for function in (commhooks.create, commhooks.describe):
        with pytest.raises(commhooks.CommHookOptionError, match="expected the name of a hook or"):
            function(hook)


def test_options_override_a_config() -> None:
    config = commhooks.create("powersgd", rank=3, seed=5).to_config()
    hook = commhooks.create(config, rank=2)
    assert hook == commhooks.create("powersgd", rank=2, seed=5)


@pytest.mark.parametrize("config", [{}, {"rank": 3}, {"name": 3}])
def test_a_config_needs_a_name(config: dict[str, object]) -> None:
    with pytest.raises(commhooks.CommHookOptionError, match="needs its name"):
        commhooks.create(config)


def test_names_of_options_are_texts() -> None:
    with pytest.raises(commhooks.CommHookOptionError, match="'topk' has no option '1'"):
        commhooks.create({"name": "topk", 1: 2, "x": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["", "my hook", "mine:2", "a,b"])
def test_a_name_must_be_usable_on_a_command_line(name: str) -> None:
    with pytest.raises(commhooks.CommHookError, match="expected a name of letters, digits"):
        define(name)


def test_a_taken_name_raises_unless_overridden() -> None:
    with pytest.raises(commhooks.CommHookError, match=r"already registered.*override=True"):
        define("allreduce")
    kind = define("allreduce", override=True)
    assert type(commhooks.create("allreduce", density=0.5)) is kind


def test_a_name_of_this_package_is_taken_before_its_hook_is_imported() -> None:
    registry._hooks.pop("topk", None)
    with pytest.raises(commhooks.CommHookError, match=r"already registered, by commhooks\..*TopK"):
        define("topk")


def test_defining_a_hook_again_replaces_it() -> None:
    """This happens when a module is reloaded, or the cell of a notebook runs twice."""
    define("sparse")
    kind = define("sparse")
    assert type(commhooks.create("sparse", density=0.5)) is kind


def test_only_hooks_can_be_registered() -> None:
    with pytest.raises(commhooks.CommHookError, match="expected a subclass of CommHook"):
        commhooks.register_hook("text")(str)  # type: ignore[type-var]


def test_a_decorator_without_a_name_raises() -> None:
    with pytest.raises(TypeError, match="name: expected str, found <class"):
        commhooks.register_hook(type(commhooks.create("allreduce")))  # type: ignore[arg-type]


def test_a_hook_without_reduce_raises() -> None:
    with pytest.raises(commhooks.CommHookError, match=r"Idle to have a method `async def reduce"):

        @commhooks.register_hook("idle")
        @dataclass
        class Idle(commhooks.CommHook):
            rank: int = 1


def test_a_hook_that_is_not_a_dataclass_raises() -> None:
    with pytest.raises(commhooks.CommHookError, match="@dataclass below @register_hook"):

        @commhooks.register_hook("forgetful")
        class Forgetful(commhooks.CommHook):
            rank: int = 1

            async def reduce(self, bucket: object, comm: object) -> Tensor:
                raise NotImplementedError


# ---------------------------------------------------------------------------- other packages


@pytest.fixture
def provided(monkeypatch: pytest.MonkeyPatch) -> dict[str, EntryPoint]:
    """Return the entry points of a package that appears to be installed."""
    points: dict[str, EntryPoint] = {}
    monkeypatch.setattr(registry, "_provided", lambda: points)
    return points


def provide(provided: dict[str, EntryPoint], name: str, value: str) -> None:
    provided[name] = EntryPoint(name, value, registry.ENTRY_POINTS)


def test_entry_points_are_loaded_on_demand(
    provided: dict[str, EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("other_hooks")
    provide(provided, "elsewhere", "other_hooks:Elsewhere")
    assert "elsewhere" in commhooks.available()
    module.Elsewhere = define("temporary")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "other_hooks", module)
    assert commhooks.create("elsewhere", density=0.5).name == "elsewhere"


def test_an_entry_point_may_name_a_module_that_registers_hooks(
    provided: dict[str, EntryPoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registering_hooks.py").write_text(
        "import commhooks\n"
        "from dataclasses import dataclass\n"
        "@commhooks.register_hook('registering')\n"
        "@dataclass\n"
        "class Registering(commhooks.CommHook):\n"
        "    async def reduce(self, bucket, comm):\n"
        "        return bucket.buffer()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    provide(provided, "registering", "registering_hooks")
    assert commhooks.create("registering").name == "registering"


def test_an_entry_point_that_cannot_be_loaded(provided: dict[str, EntryPoint]) -> None:
    provide(provided, "broken", "no_such_module:Hook")
    with pytest.raises(
        commhooks.CommHookError, match=r"'broken'.*could not be loaded.*no_such_mod"
    ):
        commhooks.create("broken")


def test_hooks_that_declare_it_are_candidates(provided: dict[str, EntryPoint]) -> None:
    provide(provided, "broken", "no_such_module:Hook")  # leaves the others
    define("reserved")
    define("willing").is_candidate = True
    assert registry.declared_candidates() == ["willing"]


def test_hooks_name_only_backends_on_which_they_have_run() -> None:
    assert commhooks.CommHook.backends == ("gloo", "nccl")
    for name in commhooks.available():
        assert set(commhooks.describe(name).backends) <= {"gloo", "nccl"}, name


def register_by_name(rank: int, size: int) -> list[str]:
    """Register every hook of this package without options and run a step with it."""
    model = commhooks.DistributedDataParallel(nn.Linear(8, 8))
    needy = []
    for name in commhooks.available():
        info = commhooks.describe(name)
        if not info.family:
            continue
        if info.needs:
            needy.append(name)
            with pytest.raises(commhooks.CommHookError):
                commhooks.register(model, name)
            continue
        handle = commhooks.register(model, name)
        model(torch.ones(1, 8)).sum().backward()
        handle.remove()
    return needy


def test_every_hook_can_be_registered_by_its_name_or_says_what_it_needs(run_ranks: Any) -> None:
    assert run_ranks(register_by_name, 2)[0] == ["guard", "hierarchical", "route", "schedule"]


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("cast", "allreduce"),
        ("error_feedback", "bf16"),
        ("hierarchical", "allreduce"),
        ("skip_nonfinite", "allreduce"),
    ],
)
def test_wrappers_have_an_inner_hook_by_default(name: str, inner: str) -> None:
    assert commhooks.create(name) == commhooks.create(name, inner=inner)
    assert f"inner: CommHook = {inner!r}" in str(commhooks.describe(name))


def test_hooks_are_described_without_their_source() -> None:
    """Classes that cloudpickle sends, or that a program executes, have none."""
    source = """
import dataclasses, torch, commhooks
@commhooks.register_hook("test_executed")
@dataclasses.dataclass
class Executed(commhooks.CommHook):
    '''Averages in place.'''
    level: int = 3
    '''Not to be found.'''
    async def reduce(self, bucket, comm):
        return bucket.buffer()
"""
    exec(source, {"__name__": "test_of_no_module"})
    text = str(commhooks.describe("test_executed"))
    assert "Averages in place." in text
    assert "level: int = 3" in text


def pickled(hook: Any) -> Any:
    return pickle.loads(pickle.dumps(hook))


def copy_trained(rank: int, size: int, copied: Any) -> None:
    """A copy has the state, and goes on with it alike."""
    for name in ("int8", "onebit", "topk"):
        hook = commhooks.create(name)
        trainer = Trainer(hook)
        for step in range(2):
            trainer.step(draw_gradients(trainer.parameters, rank, step))
        again = Trainer(commhooks.create(name))
        again.handle.load_state_dict(trainer.handle.state_dict())
        trainer.handle.replace(copied(hook))
        for step in range(2, 5):
            gradients = draw_gradients(trainer.parameters, rank, step)
            assert same_bits(trainer.step(gradients), again.step(gradients))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["copy", "pickle"])
def test_hooks_can_be_copied(run_ranks: Any, copied: Any) -> None:
    run_ranks(copy_trained, 2, copied)


def test_all_hooks_can_be_copied() -> None:
    for name in commhooks.available():
        if "needs" not in str(commhooks.describe(name)):
            hook = commhooks.create(name)
            assert copy.deepcopy(hook) == pickled(hook) == hook
