"""Registering hooks, replacing and removing them; on our wrapper and torch's."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import gathered, same_on_all_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.algorithms import AllReduce
from commhooks.hook.options import Limits
from reducer.native import NativeHook

WRAPPERS = {False: commhooks.DistributedDataParallel, True: TorchDistributedDataParallel}
both_wrappers = pytest.mark.parametrize("torch_ddp", [False, True])


def make_model(torch_ddp: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    return WRAPPERS[torch_ddp](net, **({"bucket_cap_mb": 0.0001} | options))


def backward(model: Any, rank: int) -> Tensor:
    """The gradients that come out, in one piece."""
    model.zero_grad()
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    model(inputs).square().sum().backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def average(rank: int, size: int) -> Tensor:
    net = make_model(False).module
    net.zero_grad()
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    net(inputs).square().sum().backward()
    gradients = torch.cat([parameter.grad.reshape(-1) for parameter in net.parameters()])
    dist.all_reduce(gradients.div_(size))
    return gradients


@commhooks.register_hook("test_scaled")
@dataclass
class Scaled(commhooks.CommHook):
    """The average times a factor, and a count of steps per parameter."""

    factor: Annotated[float, Limits(ge=0)] = 1.0
    seed: int = 0

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            self.state.setdefault(name, {"count": torch.zeros(shape)})["count"].add_(1)
        return await comm.all_reduce(bucket.buffer().mul_(self.factor / comm.size))


def scaled_function(factor: float, *, group: Any = None) -> Callable[..., Any]:
    def hook(anything: Any, some_bucket: Any) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(some_bucket.buffer().mul_(factor / 2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    return hook


# --------------------------------------------------------------------------- register and replace


@dataclass
class CountsNative(AllReduce):
    made: int = field(default=0, init=False)

    def native(self, group: dist.ProcessGroup, step: int | None = None) -> NativeHook:
        self.made += 1
        return super().native(group)


def count_native_hooks(rank: int, size: int) -> int:
    hook = CountsNative()
    handle = commhooks.register(make_model(False), hook)
    assert isinstance(handle.stats().total.wire_bytes, int | float)
    return hook.made


def test_one_hook_in_cpp_is_made(run_ranks: Any) -> None:
    assert run_ranks(count_native_hooks, 2) == [1, 1]


def replace_and_remove(rank: int, size: int, torch_ddp: bool) -> None:
    model = make_model(torch_ddp)
    expected = average(rank, size)
    assert commhooks.handle_of(model) is None
    handle = commhooks.register(model, "test_scaled", factor=2.0)
    assert commhooks.handle_of(model) is handle
    assert handle.hook == Scaled(2.0)
    torch.testing.assert_close(backward(model, rank), 2 * expected)

    handle.replace({"name": "test_scaled", "factor": 3.0})
    torch.testing.assert_close(backward(model, rank), 3 * expected)
    handle.replace(Scaled(4.0))
    torch.testing.assert_close(backward(model, rank), 4 * expected)
    handle.replace("allreduce")
    torch.testing.assert_close(backward(model, rank), expected)
    handle.replace(scaled_function(0.5))
    torch.testing.assert_close(backward(model, rank), expected / 2)
    handle.replace(Scaled(2.0))
    torch.testing.assert_close(backward(model, rank), 2 * expected)

    handle.remove()
    assert commhooks.handle_of(model) is None
    torch.testing.assert_close(backward(model, rank), expected)
    for use in (handle.remove, handle.stats, handle.state_dict, lambda: handle.hook):
        with pytest.raises(commhooks.CommHookError, match="has been removed"):
            use()
    commhooks.register(model, Scaled(5.0))
    torch.testing.assert_close(backward(model, rank), 5 * expected)


@both_wrappers
@pytest.mark.parametrize("size", [1, 2])
def test_replace_and_remove(run_ranks: Any, size: int, torch_ddp: bool) -> None:
    if size == 1:
        run_ranks(replace_alone, 1, torch_ddp)
    else:
        run_ranks(replace_and_remove, 2, torch_ddp)


def leave(rank: int, size: int, torch_ddp: bool) -> None:
    """Models that differed become their mean, and stay equal."""
    model = make_model(torch_ddp)
    handle = commhooks.register(model, "allreduce")
    for config in ({"name": "schedule", "stages": [[0, "local_sgd"]]}, "push_sum", "noop"):
        for removes in (False, True):
            handle.replace(config)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(3):
                backward(model, rank)
                optimizer.step()
            own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            models = gathered(own)
            assert not torch.equal(models[0], models[1])
            if removes:
                handle.remove()
            else:
                handle.replace("allreduce")
            found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            torch.testing.assert_close(found, torch.stack(models).mean(0))
            backward(model, rank)
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            assert same_on_all_ranks(own)
        handle = commhooks.register(model, "allreduce")


@both_wrappers
def test_models_are_averaged_when_a_hook_without_consensus_ends(
    run_ranks: Any, torch_ddp: bool
) -> None:
    run_ranks(leave, 3, torch_ddp)


def fail_to_average(rank: int, size: int, torch_ddp: bool) -> None:
    """The hook that the handle shows is the one that averages, whatever fails."""
    model = make_model(torch_ddp)
    handle = commhooks.register(model, "noop")
    adapter, own = handle._adapter, backward(model, rank)

    def lose_a_peer() -> None:
        raise commhooks.CommHookPeerError("lost")

    for change in (lambda: handle.replace(Scaled(3.0)), handle.remove):
        adapter.average_parameters = lose_a_peer
        with pytest.raises(commhooks.CommHookPeerError, match="lost"):
            change()
        del adapter.average_parameters
        assert handle.hook.name == "noop"
        assert torch.equal(backward(model, rank), own)
    handle.replace(Scaled(3.0))
    torch.testing.assert_close(backward(model, rank), 3.0 * average(rank, size))


@both_wrappers
def test_a_replacement_that_fails_changes_nothing(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(fail_to_average, 2, torch_ddp)


def replace_alone(rank: int, size: int, torch_ddp: bool) -> None:
    model = make_model(torch_ddp)
    expected = average(rank, size)
    handle = commhooks.register(model, Scaled(2.0))
    torch.testing.assert_close(backward(model, rank), 2 * expected)
    handle.replace("bf16")
    torch.testing.assert_close(backward(model, rank), expected, rtol=1e-2, atol=1e-2)
    handle.remove()
    torch.testing.assert_close(backward(model, rank), expected)


def use_functions(rank: int, size: int, torch_ddp: bool) -> None:
    """Torch-style hooks of every kind, among them torch's own."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    expected = average(rank, size)
    seen = []

    class Method:
        def __call__(self, state: Any, bucket: Any) -> Any:
            seen.append(state)
            return scaled_function(1.0)(state, bucket)

        def hook(self, state: Any, bucket: Any, extra: int = 0) -> Any:
            return self(state, bucket)

    kinds: list[Any] = [
        Method(),
        Method().hook,
        lambda process_group, grads: scaled_function(1.0)(process_group, grads),
        lambda *arguments: scaled_function(1.0)(*arguments),
        functools.partial(lambda factor, state, b: scaled_function(factor)(state, b), 1.0),
    ]
    model = make_model(torch_ddp)
    handle = commhooks.register(model, "noop")
    for kind in kinds:
        handle.replace(kind, state="mine")
        assert handle.hook is kind
        torch.testing.assert_close(backward(model, rank), expected)
    assert set(seen) == {"mine"}
    handle.replace(default_hooks.allreduce_hook)
    torch.testing.assert_close(backward(model, rank), expected)
    handle.replace(default_hooks.fp16_compress_hook, state=dist.group.WORLD)
    torch.testing.assert_close(backward(model, rank), expected, rtol=1e-2, atol=1e-2)
    with pytest.raises(commhooks.CommHookStateError, match="torch-style function"):
        handle.state_dict()


@both_wrappers
def test_torch_style_functions(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(use_functions, 2, torch_ddp)


def break_function(rank: int, size: int) -> None:
    """On torch's own wrapper, which does not survive this by itself."""
    model = make_model(True)
    expected = average(rank, size)

    def raising(state: Any, bucket: Any) -> Any:
        raise ValueError("no luck")

    def late(state: Any, bucket: Any) -> Any:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future.then(lambda future: 1 / 0)

    def useless(state: Any, bucket: Any) -> Any:
        return bucket.buffer()

    handle = commhooks.register(model, "allreduce")
    for broken, message in [
        (raising, "no luck"),
        (late, "division by zero"),
        (useless, r"returned Tensor for bucket 0; expected a torch.futures.Future"),
    ]:
        handle.replace(broken)
        with pytest.raises(Exception, match=message):
            backward(model, rank)
        handle.replace("allreduce")
        torch.testing.assert_close(backward(model, rank), expected)


def test_functions_that_fail(run_ranks: Any) -> None:
    run_ranks(break_function, 2)


def construct_with_hook(rank: int, size: int) -> None:
    model = make_model(False, hook="test_scaled", hook_options={"factor": 2.0})
    torch.testing.assert_close(backward(model, rank), 2 * average(rank, size))
    handle = commhooks.handle_of(model)
    assert handle is not None
    assert handle.hook == Scaled(2.0)

    with pytest.raises(ValueError, match="without a hook"):
        make_model(False, hook_options={"rank": 4})
    with pytest.raises(commhooks.UnknownHookError, match="unheard_of"):
        make_model(False, hook="unheard_of")


def test_hook_given_to_the_wrapper(run_ranks: Any) -> None:
    run_ranks(construct_with_hook, 2)


def nest_groups(rank: int, size: int, torch_ddp: bool) -> None:
    """Two models on the world and one on a part of it, with hooks at the same time."""
    part = dist.new_group([0, 1])
    models = [make_model(torch_ddp), make_model(torch_ddp)]
    if rank < 2:
        models.append(make_model(torch_ddp, process_group=part))
    for factor, model in enumerate(models):
        commhooks.register(model, Scaled(factor + 1.0))
    whole = average(rank, size)
    for _ in range(2):
        for factor, model in enumerate(models):
            found = backward(model, rank)
            if factor < 2:
                torch.testing.assert_close(found, (factor + 1) * whole)
    if rank < 2:
        assert same_on_all_ranks(found, part)


@both_wrappers
def test_several_models_and_groups(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(nest_groups, 3, torch_ddp)


def drop_model(rank: int, size: int, torch_ddp: bool) -> None:
    model = make_model(torch_ddp)
    handle = commhooks.register(model, Scaled())
    backward(model, rank)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    handle.stats()


@both_wrappers
def test_handles_do_not_keep_models(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(drop_model, 2, torch_ddp)


# ------------------------------------------------------------------------------------------ errors


def two_arguments_too_many(state: Any, bucket: Any, one: int, two: int) -> Any:
    raise NotImplementedError


def refuse(rank: int, size: int, torch_ddp: bool) -> None:
    model = make_model(torch_ddp)
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ("test_scale", {}, "did you mean 'test_scaled'"),
        ("test_scaled", {"factor": -1.0}, "option 'factor'"),
        ("test_scaled", {"factors": 1.0}, "did you mean 'factor'"),
        (Scaled(), {"factor": 2.0}, "has its options already"),
        (Scaled, {}, "expected the name of a hook"),
        (3, {}, "expected the name of a hook"),
        (two_arguments_too_many, {}, r"expected a function of two arguments, fn\(state, bucket\)"),
        (lambda bucket: None, {}, "expected a function of two arguments"),
        (scaled_function(1.0), {"stat": 3}, "has one option, state=; found stat"),
    ]
    for hook, options, message in bad:
        with pytest.raises(commhooks.CommHookError, match=message):
            commhooks.register(model, hook, **options)
    assert commhooks.handle_of(model) is None
    handle = commhooks.register(model, Scaled(2.0))
    for hook, options, message in bad:
        with pytest.raises(commhooks.CommHookError, match=message):
            handle.replace(hook, **options)
    with pytest.raises(commhooks.CommHookError, match=r"has a hook already, Scaled\(factor=2.0"):
        commhooks.register(model, Scaled())
    with pytest.raises(commhooks.CommHookError, match="in use on another model"):
        commhooks.register(make_model(torch_ddp), handle.hook)
    torch.testing.assert_close(backward(model, rank), 2 * average(rank, size))


@both_wrappers
def test_bad_hooks(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(refuse, 2, torch_ddp)


DISAGREEMENTS: list[tuple[list[tuple[Any, dict[str, Any]]], list[str]]] = [
    ([("test_scaled", {}), ("allreduce", {})], ['"test_scaled"', '"allreduce"']),
    ([("test_scaled", {"factor": 1.5}), ("test_scaled", {"factor": 2.5})], ["1.5", "2.5"]),
    ([("test_scaled", {}), ("no such hook", {})], ['"test_scaled"', "no hook is named"]),
    ([("test_scaled", {}), ("test_scaled", {"factor": "x"})], ['"test_scaled"', "found 'x'"]),
]


def disagree(rank: int, size: int, case: int) -> list[str]:
    model = make_model(False)
    messages = []
    hooks, _ = DISAGREEMENTS[case]
    hook, options = hooks[rank]
    with pytest.raises(commhooks.CommHookError) as caught:
        commhooks.register(model, hook, **options)
    messages.append(str(caught.value))
    assert commhooks.handle_of(model) is None
    handle = commhooks.register(model, Scaled(2.0))
    with pytest.raises(commhooks.CommHookError) as caught:
        handle.replace(hook, **options)
    messages.append(str(caught.value))
    assert handle.hook == Scaled(2.0)
    torch.testing.assert_close(backward(model, rank), 2 * average(rank, size))
    return messages


@pytest.mark.parametrize("case", range(len(DISAGREEMENTS)))
def test_ranks_that_disagree(run_ranks: Any, case: int) -> None:
    (first, *_), (second, *_) = run_ranks(disagree, 2, case)
    _, parts = DISAGREEMENTS[case]
    assert all(part in first for part in parts)
    assert parts[1] in second


def register_twice(rank: int, size: int, torch_ddp: bool) -> None:
    model = make_model(torch_ddp)
    model.register_comm_hook(None, torch_hook)
    with pytest.raises(commhooks.CommHookError, match=r"register_comm_hook\(\)"):
        commhooks.register(model, "allreduce")


def register_both(rank: int, size: int, torch_ddp: bool) -> None:
    model = make_model(torch_ddp)
    handle = commhooks.register(model, "int8")
    with pytest.raises(RuntimeError):
        model.register_comm_hook(None, torch_hook)
    backward(model, rank)
    assert handle.stats().steps == 1
    if torch_ddp:
        return
    handle.remove()
    model.register_comm_hook(None, torch_hook)
    with pytest.raises(commhooks.CommHookError, match=r"register_comm_hook\(\)"):
        commhooks.register(model, "allreduce")


@both_wrappers
def test_neither_way_of_registering_replaces_the_other(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(register_both, 1, torch_ddp)


def use_again(rank: int, size: int) -> None:
    """The state of a hook is of the parameters that it has seen, not of others with their names."""
    hook = commhooks.create("int4")
    model = make_model(False)
    handle = commhooks.register(model, hook)
    backward(model, rank)
    handle.remove()
    commhooks.register(model, hook).remove()  # they are the same ones
    other = make_model(False)
    with pytest.raises(commhooks.CommHookError, match="is or was in use on another model"):
        commhooks.register(other, hook)
    del model, handle
    gc.collect()
    with pytest.raises(commhooks.CommHookError, match="is or was in use on another model"):
        commhooks.register(other, hook)
    commhooks.register(other, copy.deepcopy(hook)).remove()
    hook.load_state_dict({})
    commhooks.register(other, hook)


def test_a_hook_with_state_is_not_used_on_another_model(run_ranks: Any) -> None:
    run_ranks(use_again, 2)


def torch_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    raise NotImplementedError


@both_wrappers
def test_hook_registered_through_torch(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(register_twice, 1, torch_ddp)


def wrong_backend(rank: int, size: int) -> None:
    class Elsewhere(Scaled):
        backends = ("nccl",)

    with pytest.raises(commhooks.CommHookError, match=r"works on nccl; .* uses 'gloo' for"):
        commhooks.register(make_model(False), Elsewhere())


def test_wrong_backend(run_ranks: Any) -> None:
    run_ranks(wrong_backend, 1)


# ----------------------------------------------------------------- registration checks and metrics


@dataclass
class Prepared(Scaled):
    """Sees the model when it is registered, and refuses one that it cannot work with."""

    refuses: bool = False
    seen: list[list[str]] = field(default_factory=list, init=False, repr=False, compare=False)

    def prepare(self, parameters: Any, group: dist.ProcessGroup) -> None:
        self.seen.append([*parameters, str(group.size())])
        if self.refuses and group.rank() == 1:
            raise ValueError("no luck")

    def metrics(self) -> dict[str, float]:
        return {"prepared": float(len(self.seen))}


def prepare(rank: int, size: int, torch_ddp: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    net[1].requires_grad_(False)
    model = WRAPPERS[torch_ddp](net)
    handle = commhooks.register(model, Prepared(2.0))
    hook: Any = handle.hook
    assert hook.seen == [["0.weight", "0.bias", "2.weight", "2.bias", "2"]]
    assert handle.stats().metrics == {"prepared": 1.0}
    assert str(handle.stats()).endswith("prepared: 1")
    with pytest.raises(commhooks.CommHookError, match=r"prepare\(\) of hook.*no luck|same hook"):
        handle.replace(Prepared(3.0, refuses=True))
    assert handle.hook is hook
    handle.replace("allreduce")
    assert handle.stats().metrics == {}


@both_wrappers
def test_hooks_are_prepared_and_have_metrics(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(prepare, 2, torch_ddp)
