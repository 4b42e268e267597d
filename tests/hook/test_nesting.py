"""Hooks among the options of hooks: made from configs, checked, and stored in saved states."""

import copy
import io
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import gathered
from support.states import hook_state, of_rank
from torch import Tensor, nn

import commhooks
from commhooks.hook.base import tree

Counts = list[str]


@commhooks.register_hook("test_counting")
@dataclass
class Counting(commhooks.CommHook):
    """Average; count steps per parameter, and record the calls of other methods."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    told: Counts = field(default_factory=list, init=False, repr=False, compare=False)

    def prepare(self, parameters: Any, group: dist.ProcessGroup) -> None:
        self.told.append(f"prepare {len(parameters)} of {group.size()}")

    def recover(self) -> None:
        self.told.append("recover")

    def metrics(self) -> dict[str, float]:
        return {"told": float(len(self.told))}

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        if self.seed == 13:
            raise ValueError("unlucky")
        number = torch.rand((), generator=comm.generator)
        average = await comm.all_reduce(bucket.buffer().div_(comm.size))
        for name in bucket.names:
            entry = self.state.setdefault(name, {"count": torch.zeros(()), "random": number})
            entry["count"] += 1
            entry["random"] = number
        return average


@commhooks.register_hook("test_outer")
@dataclass
class Outer(commhooks.CommHook):
    """Average with the first nested hook, then average the result with the next one, and so on."""

    inner: commhooks.CommHook
    more: list[tuple[int, commhooks.CommHook]] = field(default_factory=list)
    named: dict[str, commhooks.CommHook] | None = None

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        result = bucket.buffer()
        for hook in self.nested().values():
            result = await hook.reduce(bucket, comm.within(hook))
            bucket.set_buffer(result)
        return result


CONFIG = {
    "name": "test_outer",
    "inner": {"name": "test_outer", "inner": {"name": "test_counting", "dtype": "bfloat16"}},
    "more": [[3, "test_counting"], [5, {"name": "test_counting", "seed": 7}]],
    "named": {"a": "allreduce"},
}
EXPECTED = Outer(
    inner=Outer(Counting(dtype=torch.bfloat16)),
    more=[(3, Counting()), (5, Counting(7))],
    named={"a": commhooks.algorithms.AllReduce()},
)


def test_hooks_come_from_names_and_configs() -> None:
    hook = commhooks.create(CONFIG)
    assert hook == EXPECTED
    assert commhooks.create("test_outer", inner="test_counting") == Outer(Counting())
    assert Outer("test_counting") == Outer(Counting())  # type: ignore[arg-type]
    inner = Counting()
    outer: Any = commhooks.create("test_outer", inner=inner)
    assert outer.inner is inner


def test_config_and_source_make_an_equal_hook() -> None:
    stored = json.dumps(EXPECTED.to_config())
    assert commhooks.create(json.loads(stored)) == EXPECTED
    names = {"Outer": Outer, "Counting": Counting, "AllReduce": commhooks.algorithms.AllReduce}
    assert eval(repr(EXPECTED), names | {"torch": torch}) == EXPECTED


@pytest.mark.exhaustive
def test_a_config_from_yaml() -> None:
    yaml = pytest.importorskip("yaml")  # extra `docs`
    text = """
        name: test_outer
        inner: {name: test_outer, inner: {name: test_counting, dtype: bfloat16}}
        more:
          - [3, test_counting]
          - [5, {name: test_counting, seed: 7}]
        named:
          a: allreduce
        """
    assert commhooks.create(yaml.safe_load(text)) == EXPECTED
    with pytest.raises(commhooks.CommHookOptionError, match=r"^inner: .* contains itself"):
        commhooks.create(yaml.safe_load("&hook {name: test_outer, inner: *hook}"))


def test_a_config_that_contains_itself() -> None:
    config: dict[str, Any] = {"name": "test_outer"}
    config["inner"] = config
    with pytest.raises(commhooks.CommHookOptionError, match=r"^inner: .* contains itself"):
        commhooks.create(config)


def test_paths_lead_to_nested_hooks() -> None:
    assert list(EXPECTED.nested()) == ["inner", "more.0.1", "more.1.1", "named.a"]
    assert len(list(tree(EXPECTED))) == 6


def test_description() -> None:
    info = commhooks.describe("test_outer")
    assert [str(option) for option in info.options] == [
        "inner: CommHook",
        "more: list[tuple[int, CommHook]] = []",
        "named: dict[str, CommHook] | None = None",
    ]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"inner": 3},
            commhooks.CommHookOptionError,
            "^option 'inner'.*expected CommHook; found 3",
        ),
        ({"inner": "fp15"}, commhooks.UnknownHookError, "^inner: no hook is named 'fp15'"),
        ({"inner": {"seed": 1}}, commhooks.CommHookOptionError, "^inner: .* needs its name"),
        (
            {"inner": {"name": "test_outer", "inner": {"name": "powersgd", "rank": 0}}},
            commhooks.CommHookOptionError,
            "^inner.inner.rank: option 'rank' of hook 'powersgd': expected int, >= 1; found 0",
        ),
        (
            {"inner": {"name": "test_outer", "inner": {"name": "powersgd", "rnk": 1}}},
            commhooks.CommHookOptionError,
            "^inner.inner.rnk: hook 'powersgd' has no option 'rnk'; did you mean 'rank'",
        ),
        ({"inner": "test_outer"}, commhooks.CommHookOptionError, "^inner.inner: .* needs the opti"),
        (
            {"inner": "fp16", "more": [[3, {"name": "test_counting", "seed": "x"}]]},
            commhooks.CommHookOptionError,
            "^more.0.1.seed: .*expected int; found 'x'",
        ),
        (
            {"inner": "fp16", "more": [["x", "fp16"]]},
            commhooks.CommHookOptionError,
            "it is not of type int",
        ),
        ({"inner": "fp16", "more": [[3]]}, commhooks.CommHookOptionError, "^option 'more'"),
        ({"inner": "fp16", "named": {"a": "b"}}, commhooks.UnknownHookError, "^named.a: no hook"),
    ],
)
def test_errors_name_the_path(options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        commhooks.create("test_outer", **options)


# ------------------------------------------------------------------------------------ on a model


def make_model() -> commhooks.DistributedDataParallel:
    torch.manual_seed(0)
    return commhooks.DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))


def backward(model: nn.Module, rank: int) -> None:
    model.zero_grad()
    model(torch.full((2, 6), rank + 1.0)).square().sum().backward()


def refuse(rank: int, size: int) -> None:
    model = make_model()
    handle = commhooks.register(model, "allreduce")
    cycle = Outer(Outer(Counting()))
    cycle.inner.inner = cycle  # type: ignore[attr-defined]
    with pytest.raises(commhooks.CommHookError, match=r"contains itself.*'inner\.inner'|same hook"):
        handle.replace(cycle if rank == 1 else "fp16")
    shared = Counting()
    with pytest.raises(commhooks.CommHookError, match=r"both 'inner' and 'more\.0\.1'"):
        handle.replace(Outer(shared, [(3, shared)]))

    class Elsewhere(Counting):
        backends = ("nccl",)

    with pytest.raises(commhooks.CommHookError, match=r"Elsewhere\(.*works on nccl"):
        handle.replace(Outer(Outer(Elsewhere())))
    other = make_model()
    commhooks.register(other, Outer(shared))
    with pytest.raises(commhooks.CommHookError, match=r"^Counting\(.*in use on another model"):
        handle.replace(Outer(Outer(shared)))
    assert handle.hook == commhooks.create("allreduce")
    del other


def test_registration_checks_nested_hooks(run_ranks: Any) -> None:
    run_ranks(refuse, 2)


def use(rank: int, size: int) -> None:
    model = make_model()
    hook = Outer(Counting(), [(3, Counting(7))])
    handle = commhooks.register(model, hook)
    for _ in range(3):
        backward(model, rank)
    for nested in hook.nested().values():
        assert nested.told == ["prepare 4 of 2"]  # type: ignore[attr-defined]
    assert handle.stats().metrics == {"inner.told": 1.0, "more.0.1.told": 1.0}
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    state = hook_state(handle)
    assert state.keys() == {".inner", ".more.0.1"}
    assert state[".inner"].keys() == state[".more.0.1"].keys() == names
    # Each hook has its own random numbers, by its seed; they are the same on all ranks.
    number = hook.inner.state["0.weight"]["random"]
    assert number != hook.more[0][1].state["0.weight"]["random"]
    numbers = gathered(number)
    assert numbers[0] == numbers[1]

    hook.inner.seed = 13 if rank == 0 else 0  # type: ignore[attr-defined]
    with pytest.raises(commhooks.CommHookError, match="unlucky"):
        backward(model, rank)
    hook.inner.seed = 0  # type: ignore[attr-defined]
    backward(model, rank)
    for nested in hook.nested().values():
        assert nested.told[1:] == ["recover"]  # type: ignore[attr-defined]


def test_nested_hooks_get_all_calls(run_ranks: Any) -> None:
    run_ranks(use, 2)


def resume(rank: int, size: int) -> None:
    model = make_model()
    handle = commhooks.register(model, CONFIG)
    backward(model, rank)
    backward(model, rank)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    other = make_model()
    resumed = commhooks.register(other, CONFIG)
    backward(other, rank)
    resumed.load_state_dict(saved)
    backward(other, rank)
    hook: Any = resumed.hook
    assert hook.inner.inner.state["0.weight"]["count"] == 3
    assert hook.more[1][1].state["1.bias"]["count"] == 3
    before = resumed.state_dict()

    state, config = of_rank(saved), json.loads(saved["hook"])
    inner = state[".inner"]

    def changed(**changes: Any) -> dict[str, Any]:
        if changes.get("state"):
            changes["state"] = {f"rank {rank} of 2x1": changes["state"]}
        return copy.deepcopy(saved) | changes

    def with_inner(name: str, value: Any) -> dict[str, Any]:
        return changed(state=state | {".inner": {".inner": inner[".inner"] | {name: value}}})

    seeded = copy.deepcopy(config)
    seeded["more"][1][1]["seed"] = 8
    for value, message in [
        (
            changed(hook=json.dumps(seeded)),
            r"has more\.1\.1\.seed=7, .*saved with more\.1\.1\.seed=8",
        ),
        (changed(state=state | {".other": {}}), "'.other': there is no such nested hook"),
        (changed(state=state | {".inner": 3}), "'.inner': expected tensors by name, found int"),
        (with_inner("9", {}), r"at '.inner.inner', '9': there is no such parameter"),
        (with_inner("0.bias", {"count": 3}), r"'.inner.inner', '0.bias': field 'count'.* a tensor"),
        (with_inner("0.bias", {"count": torch.ones(2)}), r"'0.bias': .* of shape \(\), found"),
    ]:
        with pytest.raises(commhooks.CommHookStateError, match=message):
            resumed.load_state_dict(value)
        assert str(resumed.state_dict()) == str(before)
    resumed.load_state_dict(changed(state={}))
    assert hook_state(resumed) == {}


def test_state_is_resumed_and_checked(run_ranks: Any) -> None:
    run_ranks(resume, 2)


@dataclass
class Refusing(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if any(entry["count"] < 0 for entry in state.values()):
            raise ValueError("negative")


def load_halfway(rank: int, size: int) -> None:
    model = make_model()
    handle = commhooks.register(model, Outer(Counting(), [(1, Refusing())]))
    backward(model, rank)
    saved = handle.state_dict()
    damaged = copy.deepcopy(saved)
    of_rank(damaged)[".inner"]["0.bias"]["count"].fill_(5)
    of_rank(damaged)[".more.0.1"]["0.bias"]["count"].neg_()
    with pytest.raises(commhooks.CommHookStateError, match="cannot use the saved state: negative"):
        handle.load_state_dict(damaged)
    assert str(handle.state_dict()) == str(saved)


def test_a_state_is_loaded_completely_or_not_at_all(run_ranks: Any) -> None:
    run_ranks(load_halfway, 1)
