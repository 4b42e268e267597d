"""Route: different hooks for different parameters."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.inner_hooks import Recorder
from support.states import hook_state
from torch import Tensor

import commhooks
from commhooks.algorithms import ErrorFeedback, Route
from commhooks.hook.base import ModelInfo, prepare_all
from commhooks.hook.derived_bucket import BucketPart
from commhooks.testing.compare import differences, mean_over_ranks, same_bits
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters
from reducer import GradBucket

PARAMETERS = probe_parameters()


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2


class Rules:
    @staticmethod
    def is_large(name: str, parameter: Tensor) -> bool:
        return parameter.numel() > 100


# ------------------------------------------------------------------------------ rules and configs


def test_rules_survive_json() -> None:
    rules: Any = [
        ("*.bias", "allreduce"),
        (is_matrix, {"name": "powersgd", "rank": 2}),
        (Rules.is_large, "fp16"),
    ]
    hook: Any = commhooks.create("route", rules=rules, default="bf16")
    assert [rule for rule, _ in hook.rules] == [
        "*.bias",
        f"{__name__}:is_matrix",
        f"{__name__}:Rules.is_large",
    ]
    assert commhooks.create(json.loads(json.dumps(hook.to_config()))) == hook
    names = {type(nested).__name__: type(nested) for nested in hook.nested().values()}
    assert eval(repr(hook), names | {"Route": Route}) == hook


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([], "option 'rules'.*length >= 1"),
        ([["*"]], "option 'rules'"),
        ([["*", "fp15"]], "rules.0.1: no hook is named 'fp15'"),
        ([[3, "fp16"]], "option 'rules'"),
        ([[lambda name, parameter: True, "fp16"]], "has to be a function of a module"),
        ([["no.such:module", "fp16"]], r"'rules\.0\.0'.*no 'module' in a module 'no.such'"),
        ([["*", "fp16"], ["json:nothing", "fp16"]], r"'rules\.1\.0'.*no 'nothing' in a module"),
        ([["json:__name__", "fp16"]], "expected json:__name__ to be a function"),
        (
            [["@embed", "fp16"]],
            r"'rules\.0\.0' of hook 'route'.*one of the roles @1d, @embedding, @output, f",
        ),
    ],
)
def test_bad_rules(rules: Any, message: str) -> None:
    with pytest.raises(commhooks.CommHookError, match=message):
        commhooks.create("route", rules=rules)


def refuse(rank: int, size: int, stock: bool) -> None:
    trainer = Trainer(commhooks.create("allreduce"), PARAMETERS, torch_ddp=stock)
    bad: list[tuple[list[Any], str]] = [
        ([["m*", "fp16"]], "no rule matches 'vector', 'scalar', 'empty', 'convolution' and 3 more"),
        ([["*", "fp16"], ["nothing.*", "fp16"]], r"rule 'nothing\.\*' matches no parameter"),
        (
            [["*", "fp16"], ["m*", "fp16"]],
            r"earlier rules take all that rule 'm\*' matches, 'matrix'",
        ),
        ([["MATRIX", "fp16"], ["*", "fp16"]], "rule 'MATRIX' matches no parameter"),
    ]
    for rules, message in bad:
        with pytest.raises(commhooks.CommHookError, match=message):
            trainer.handle.replace("route", rules=rules)
    assert trainer.handle.hook == commhooks.create("allreduce")


@pytest.mark.parametrize("stock", [False, True])
def test_rules_that_do_not_match_the_model(run_ranks: Any, stock: bool) -> None:
    run_ranks(refuse, 2, stock)


ROLES = {"tokens": "embedding", "head": "output", "head_bias": "output"}
BY_ROLE = [["@1d", "allreduce"], ["@embedding", "bf16"], ["@output", "fp16"]]


@pytest.mark.parametrize(
    ("rules", "positions"),
    [
        (BY_ROLE, (1, 2, 0, 3, 0)),
        (BY_ROLE[::-1], (1, 0, 0, 3, 2)),
        ([["head*", "fp16"], ["@output", "bf16"]], (2, 0, 0, 2, 2)),  # the second gets nothing
    ],
)
def test_rules_for_roles(rules: Any, positions: tuple[int, ...]) -> None:
    """Parameters of at most one dimension, embeddings, the output; the first rule decides."""
    hook: Any = commhooks.create("route", rules=rules, default="int8")
    shapes: dict[str, tuple[int, ...]] = {"tokens": (2, 3), "head": (3, 2), "head_bias": (3,)}
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    parameters |= {"matrix": torch.zeros(2, 2), "scale": torch.zeros(())}
    group: Any = None
    prepare_all(hook, parameters, group, ModelInfo(ROLES))  # type: ignore[arg-type]
    names = ("tokens", "head", "head_bias", "matrix", "scale")
    assert tuple(hook.bucket_key(name)[0] for name in names) == positions


def test_roles_that_the_model_has_not() -> None:
    hook = commhooks.create("route", rules=BY_ROLE, default="int8")
    group: Any = None
    prepare_all(hook, {"matrix": torch.zeros(2, 2)}, group, ModelInfo({}))
    assert hook.bucket_key("matrix") == (3, ())
    with pytest.raises(commhooks.CommHookError, match="'@embedding' needs the modules"):
        prepare_all(hook, {"matrix": torch.zeros(2, 2)}, group)


# ------------------------------------------------------------------------------- parts of buckets


def test_parts_are_extracted_and_stored() -> None:
    tensors = list(PARAMETERS.values())
    flat = torch.arange(float(sum(tensor.numel() for tensor in tensors)))
    bucket = GradBucket(flat.clone(), tensors, list(PARAMETERS))
    members = [4, 0, 3, 6]  # convolution, matrix, empty, transposed
    part = BucketPart(bucket, members)
    own = part.bucket(3, is_last=True)
    assert own.names == [bucket.names[i] for i in members]
    assert (own.index(), own.is_last()) == (3, True)
    for found, i in zip(own.gradients(), members, strict=True):
        assert torch.equal(found, bucket.gradients()[i])
        assert found.stride() == bucket.gradients()[i].stride()
    own.buffer().neg_()
    assert torch.equal(bucket.buffer(), flat)
    part.store(own.buffer(), bucket.buffer())
    for i, gradient in enumerate(bucket.gradients()):
        assert (gradient <= 0).all() if i in members else (gradient >= 0).all()
    assert torch.equal(bucket.buffer().abs(), flat)


def test_a_whole_bucket_is_not_copied() -> None:
    tensors = list(PARAMETERS.values())
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors))
    bucket = GradBucket(flat, tensors, list(PARAMETERS))
    assert BucketPart(bucket, range(len(tensors))).bucket(0, is_last=False).buffer() is flat


# ------------------------------------------------------------------------------------- on a model


def split(rank: int, size: int, stock: bool, bucket_cap_mb: float) -> None:
    hooks = [Recorder(tag=tag) for tag in "abc"]
    rules: Any = [("*d", hooks[0]), (is_matrix, hooks[1])]
    hook = Route(rules, default=hooks[2])
    trainer = Trainer(hook, PARAMETERS, torch_ddp=stock, bucket_cap_mb=bucket_cap_mb)
    expected = [
        {"transposed", "odd"},
        {"matrix", "empty"},
        {"vector", "scalar", "convolution", "spare"},
    ]
    for inner, names in zip(hooks, expected, strict=True):
        assert set(inner.prepared) == names
    for step in range(3):
        of_ranks = [draw_gradients(PARAMETERS, peer, step) for peer in range(size)]
        found = trainer.step(of_ranks[rank])
        assert not differences(found, mean_over_ranks(of_ranks, PARAMETERS), size)
    for inner, names in zip(hooks, expected, strict=True):
        for step in range(3):
            calls = [call for call in inner.calls if call.step == step]
            assert {name for call in calls for name in call.names} == names
            assert [call.index for call in calls] == list(range(len(calls)))
            assert [call.is_last for call in calls] == [False] * (len(calls) - 1) + [True]
        assert inner.counts() == dict.fromkeys(names, 3.0)
    state = hook_state(trainer.handle)
    assert state.keys() == {".rules.0.1", ".rules.1.1", ".default"}


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("bucket_cap_mb", [0.0003, 25])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_hook_gets_its_own_parameters(
    run_ranks: Any, size: int, bucket_cap_mb: float, stock: bool
) -> None:
    run_ranks(split, size, stock, bucket_cap_mb)


def cut(rank: int, size: int, options: dict[str, bool]) -> None:
    """On commhooks' wrapper no bucket has several routes; removing the hook restores buckets."""
    trainer = Trainer(commhooks.create("allreduce"), PARAMETERS, bucket_cap_mb=25, **options)

    def train(step: int) -> list[set[str]]:
        of_ranks = [draw_gradients(PARAMETERS, peer, step) for peer in range(size)]
        found = trainer.step(of_ranks[rank])
        assert not differences(found, mean_over_ranks(of_ranks, PARAMETERS), size)
        return [set(bucket.names) for bucket in trainer.handle.stats().buckets]

    everything = [set(PARAMETERS)]
    assert train(0) == train(1) == everything
    rules: Any = [("m*", "allreduce"), ("v*", Recorder())]
    routed = commhooks.create("route", rules=rules, default="allreduce")
    trainer.handle.replace("schedule", stages=[(0, routed)])
    rest = set(PARAMETERS) - {"matrix", "vector"}
    for step in (2, 3):
        buckets = train(step)
        assert len(buckets) == 3
        assert all(names in buckets for names in ({"matrix"}, {"vector"}, rest))
    trainer.handle.replace("allreduce")
    assert train(4) == everything
    trainer.handle.replace("route", rules=[["m*", "noop"]], default="allreduce")
    assert len(trainer.handle.stats().buckets) == 2
    trainer.handle.remove()
    trainer.handle = commhooks.register(trainer.model, "allreduce")
    assert train(5) == everything


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
def test_buckets_are_built_by_route(run_ranks: Any, options: dict[str, bool]) -> None:
    run_ranks(cut, 2, options)


def cut_after_forward(rank: int, size: int, options: dict[str, bool]) -> None:
    """A forward without backward precedes, for example to read the loss, on one rank or on all."""
    trainer = Trainer(commhooks.create("allreduce"), PARAMETERS, **options)
    used = {name: tensor for name, tensor in PARAMETERS.items() if name != "spare"}
    for step in range(4):
        of_ranks = [draw_gradients(used, peer, step) for peer in range(size)]
        loss = trainer.model(of_ranks[rank])
        if rank == 0 or step > 1:
            trainer.model(of_ranks[rank])
        if step == 1:
            trainer.handle.replace("route", rules=[["m*", "bf16"]], default="allreduce")
        if step == 2:
            trainer.handle.replace("route", rules=[["v*", "allreduce"]], default="allreduce")
        for parameter in trainer.parameters.values():
            parameter.grad = None
        loss.backward()
        found = {name: p.grad for name, p in trainer.parameters.items() if p.grad is not None}
        mean = mean_over_ranks(of_ranks, used)
        if step == 1:
            del mean["matrix"]  # in half precision
        assert not differences(found, mean, size)


@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
def test_buckets_can_be_rebuilt_between_forward_and_backward(
    run_ranks: Any, options: dict[str, bool]
) -> None:
    run_ranks(cut_after_forward, 2, options)


def keep_keys(rank: int, size: int) -> None:
    """A model keeps its own keys, and its buckets are split by route."""
    trainer = Trainer(
        commhooks.create("route", rules=[["[mv]*", Recorder()]], default="allreduce"),
        PARAMETERS,
        bucket_cap_mb=25,
        group_key=lambda name, parameter: name[0] in "ms",
    )
    of_ranks = [draw_gradients(PARAMETERS, peer, 0) for peer in range(size)]
    found = trainer.step(of_ranks[rank])
    assert not differences(found, mean_over_ranks(of_ranks, PARAMETERS), size)
    buckets = [set(bucket.names) for bucket in trainer.handle.stats().buckets]
    assert {name[0] in "ms" for name in buckets[0]} != {name[0] in "ms" for name in buckets[1]}
    assert len(buckets) == 2


def test_keys_of_the_model_are_kept(run_ranks: Any) -> None:
    run_ranks(keep_keys, 2)


class Lanes(torch.nn.Module):
    """A model with sparse gradients, which hooks do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 3, sparse=True)
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, indices: Tensor) -> Tensor:
        return self.second(self.first(self.embedding(indices)))


def leave_out(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(Lanes())
    hooks = [Recorder(tag="a"), Recorder(tag="b")]
    rules: Any = [("first.*", hooks[0]), ("second.*", hooks[1])]
    with pytest.warns(UserWarning, match="gradients of embedding.weight are sparse"):
        handle = commhooks.register(model, "route", rules=rules)
    model(torch.tensor([1, rank])).sum().backward()
    for hook in hooks:
        assert [call.is_last for call in hook.calls][-1]
    with pytest.raises(commhooks.CommHookError, match=r"rule 'embedding\.\*' matches no parameter"):
        handle.replace("route", rules=[["embedding.*", "fp16"]], default="fp16")


def test_parameters_that_hooks_do_not_see(run_ranks: Any) -> None:
    run_ranks(leave_out, 2)


def skip(rank: int, size: int, names: list[str]) -> None:
    """Buckets have one parameter. Each route's last bucket is marked, whichever are left out."""
    hooks = [Recorder(tag="outer"), Recorder(tag="inner")]
    inner = Route([("c*", hooks[1])], default=commhooks.create("allreduce"))
    hook = Route([("a*", hooks[0])], default=inner)
    parameters = {name: torch.zeros(3) for name in ("a0", "c0", "b0", "a1", "c1", "b1")}
    trainer = Trainer(
        hook,
        parameters,
        bucket_cap_mb=1e-6,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
    )
    used = {name: parameters[name] for name in names}
    for step in range(3):
        trainer.step(draw_gradients(used, rank, step))
    for recorder, letter in zip(hooks, "ac", strict=True):
        own = [name for name in names if name.startswith(letter)]
        for step in range(3):
            calls = [call for call in recorder.calls if call.step == step]
            assert sorted(name for call in calls for name in call.names) == own
            assert [call.index for call in calls] == list(range(len(own)))
            assert [call.is_last for call in calls] == [False] * (len(own) - 1) + [True]


@pytest.mark.parametrize(
    "names", [["a0", "b0", "c0"], ["a1", "b0", "c1"], ["a0", "a1", "b0", "c0"]]
)
def test_last_bucket_is_marked_if_others_are_left_out(run_ranks: Any, names: list[str]) -> None:
    run_ranks(skip, 2, names)


def feed_back(rank: int, size: int) -> None:
    """Error feedback around a route keeps the errors of each route's hook."""
    rules: Any = [("m*", Recorder(threshold=1.0)), ("v*", commhooks.create("bf16"))]
    hook = ErrorFeedback(Route(rules, default=commhooks.create("allreduce")))
    trainer = Trainer(hook, PARAMETERS, bucket_cap_mb=25)
    gradients = draw_gradients(PARAMETERS, rank, 0)
    trainer.step(gradients)
    errors = {name: entry["error"] for name, entry in hook.state.items()}
    small = gradients["matrix"].where(gradients["matrix"].abs() < 1, 0)
    torch.testing.assert_close(errors["matrix"], small, rtol=0, atol=1e-6)
    rounded = gradients["vector"] - gradients["vector"].bfloat16()
    torch.testing.assert_close(errors["vector"], rounded, rtol=0, atol=1e-6)
    assert not errors["odd"].any()


def test_error_feedback_around_a_route(run_ranks: Any) -> None:
    run_ranks(feed_back, 2)


@pytest.mark.parametrize("config", ["auto", {"name": "route", "rules": [["*", "int8"]]}], ids=str)
def test_bytes_are_not_known_before_registration(config: Any) -> None:
    bucket = commhooks.GradBucket(torch.zeros(4), [torch.zeros(4)], ["w"])
    assert commhooks.create(config).wire_bytes(bucket, 2) is None


def count_bytes(rank: int, size: int) -> None:
    parameters = {"a": torch.zeros(30), "b": torch.zeros(50), "c": torch.zeros(70)}
    hook = commhooks.create("route", rules=[["a", "bf16"], ["c", "noop"]], default="allreduce")
    trainer = Trainer(hook, parameters)
    trainer.step(draw_gradients(parameters, rank, 0))
    assert trainer.handle.stats().total.wire_bytes == 2 * 30 + 4 * 50


def test_wire(run_ranks: Any) -> None:
    run_ranks(count_bytes, 2)


def compose(rank: int, size: int) -> None:
    """A hook gives the same results on its route as on a model with only these parameters."""
    powersgd = {"name": "powersgd", "rank": 2, "start_step": 0, "min_compression_rate": 1.0}
    rules = [["[mo]*", powersgd], ["*", {"name": "schedule", "stages": [[0, "bf16"], [1, "fp16"]]}]]
    routed = Trainer(commhooks.create("route", rules=rules), PARAMETERS, bucket_cap_mb=25)
    parts = [
        {name: tensor for name, tensor in PARAMETERS.items() if (name[0] in "mo") == is_first}
        for is_first in (True, False)
    ]
    alone = [
        Trainer(commhooks.create(config), part, bucket_cap_mb=25)  # type: ignore[arg-type]
        for (_, config), part in zip(rules, parts, strict=True)
    ]
    for step in range(3):
        gradients = draw_gradients(PARAMETERS, rank, step)
        found = routed.step(gradients)
        for trainer, part in zip(alone, parts, strict=True):
            expected = trainer.step({name: gradients[name] for name in part})
            assert same_bits({name: found[name] for name in part}, expected)
    dist.barrier()


def test_same_results_as_on_separate_models(run_ranks: Any) -> None:
    run_ranks(compose, 2)
