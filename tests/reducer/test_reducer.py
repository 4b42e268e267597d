"""Comparison with torch's reducer on the same inputs: gradients must be equal bit for bit."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.comm.communicator import Communicator
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel, GradBucket

SMALL_BUCKETS_MB = 0.02


class ConvNet(nn.Module):
    """A small net with parameters of 4, 2, 1 and 0 dimensions, empty and of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3)
        self.linear = nn.Linear(7 * 36, 51)
        self.head = nn.Linear(51, 10)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.linear(self.conv(x).flatten(1)).relu()
        return self.head(features) * self.scale + self.empty.sum()


def conv_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return ConvNet().to(dtype).to(memory_format=torch.channels_last)


def train(
    model: nn.Module, rank: int, *, set_to_none: bool = True, steps: int = 4, no_sync_at: int = 2
) -> list[torch.Tensor]:
    """Train, accumulating in one step; return all gradients and the final parameters."""
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(steps):
        x = torch.randn(4, 3, 8, 8, generator=data).to(dtype)
        if step == no_sync_at:
            with model.no_sync():  # type: ignore[operator]
                model(x).sum().backward()
        model(x).square().mean().backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return seen + [p.detach().clone() for p in model.parameters()]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor], world_size: int) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        if world_size <= 2:
            assert torch.equal(a, b)
        else:  # the order of a sum depends on the position in the bucket
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def against_torch(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    set_to_none = options.pop("set_to_none")
    runs = [
        train(
            wrapper(conv_net(dtype), bucket_cap_mb=SMALL_BUCKETS_MB, **options),
            rank,
            set_to_none=set_to_none,
        )
        for wrapper in (DistributedDataParallel, TorchDDP)
    ]
    assert_same(runs[0], runs[1], world_size)


MODES: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize(
    ("view", "set_to_none", "mode"), list(itertools.product([False, True], [False, True], MODES))
)
def test_same_gradients_as_torch(view: bool, set_to_none: bool, mode: dict[str, Any]) -> None:
    options = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, **mode}
    run_ranks(against_torch, 2, torch.float32, options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("view", [False, True])
def test_other_dtypes(dtype: torch.dtype, view: bool) -> None:
    run_ranks(against_torch, 2, dtype, {"gradient_as_bucket_view": view, "set_to_none": True})


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_sizes(world_size: int) -> None:
    run_ranks(against_torch, world_size, torch.float32, {"set_to_none": True})


def mixed_dtypes(rank: int, world_size: int) -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3).bfloat16()])
    wrapped = DistributedDataParallel(model)
    stats = wrapped.reducer.bucket_stats()
    assert [len(row["names"]) for row in stats] == [2, 2, 2]
    wrapped.module.forward = lambda x: sum(
        layer(x.to(layer.weight.dtype)).double() for layer in model
    )
    wrapped(torch.ones(1, 3) * (rank + 1)).sum().backward()
    for layer in model:
        expected = (1 + world_size) / 2
        assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, expected))


def test_buckets_contain_one_dtype() -> None:
    run_ranks(mixed_dtypes, 2)


# ------------------------------------------------------------------------------------- buckets


class Chain(nn.Module):
    """Layers of 1 KiB that are used in a given order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(4)])
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def bucket_names(model: DistributedDataParallel) -> list[list[str]]:
    return [[name.split(".")[1] for name in row["names"]] for row in model.reducer.bucket_stats()]


def buckets_after(rank: int, world_size: int, options: dict[str, Any]) -> list[list[list[str]]]:
    # The order of layers differs between ranks 0 and 1.
    chain = Chain([2, 0, 1, 3] if rank == 0 else [0, 1, 2, 3])
    model = DistributedDataParallel(chain, bucket_cap_mb=0.0015, **options)
    plans = []
    for _ in range(2):
        plans.append(bucket_names(model))
        model(torch.ones(1, 16)).sum().backward()
    return [*plans, bucket_names(model)]


def test_buckets_are_rebuilt_in_the_order_of_gradients_on_rank_0() -> None:
    for before, second, third in run_ranks(buckets_after, 2, {}):
        assert before == [["3", "2"], ["1", "0"]]  # reverse registration order at first
        assert second == before  # rebuilt in the second forward
        assert third == [["3", "1"], ["0", "2"]]


def test_stable_buckets_are_not_rebuilt() -> None:
    for plans in run_ranks(buckets_after, 2, {"stable_buckets": True}):
        assert plans[0] == plans[1] == plans[2]


def grouped(rank: int, world_size: int) -> list[list[str]]:
    model = DistributedDataParallel(
        Chain([0, 1, 2, 3]), group_key=lambda name, _: int(name.split(".")[1]) % 2
    )
    model(torch.ones(1, 16)).sum().backward()
    return bucket_names(model)


def test_group_keys_separate_buckets() -> None:
    assert run_ranks(grouped, 1)[0] == [["3", "1"], ["2", "0"]]


def first_bucket_is_small(rank: int, world_size: int) -> list[int]:
    layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])
    model = DistributedDataParallel(layers, bucket_cap_mb=2)
    return [row["gradient_bytes"] for row in model.reducer.bucket_stats()]


def test_first_bucket_is_small() -> None:
    mib = 1024 * 1024
    assert run_ranks(first_bucket_is_small, 1)[0] == [mib, 2 * mib, 2 * mib, mib]


# ------------------------------------------------------------------------------- GradBucket


def look_at_buckets(rank: int, world_size: int, view: bool) -> None:
    model = DistributedDataParallel(
        conv_net(), bucket_cap_mb=SMALL_BUCKETS_MB, gradient_as_bucket_view=view
    )
    parameters = dict(model.module.named_parameters())
    seen: list[tuple[int, int, bool]] = []

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert isinstance(bucket, dist.GradBucket)
        assert bucket.buffer().dim() == 1
        for name, gradient, parameter, offset, length, shape in zip(
            bucket.names,
            bucket.gradients(),
            bucket.parameters(),
            bucket.offsets,
            bucket.lengths,
            bucket.shapes,
            strict=True,
        ):
            assert parameter is parameters[name]
            assert gradient.shape == shape == parameter.shape
            assert gradient.stride() == parameter.stride()
            assert gradient.numel() == length
            assert gradient.storage_offset() == offset
            # Also in channels_last.
            assert torch.equal(gradient, parameter.grad)
        seen.append((bucket.step, bucket.index(), bucket.is_last()))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(3):
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    count = len(model.reducer.bucket_stats())
    assert seen == [
        (step, index, index == count - 1)
        for step, index in itertools.product(range(3), range(count))
    ]


@pytest.mark.parametrize("view", [False, True])
def test_the_bucket_that_a_hook_gets(view: bool) -> None:
    run_ranks(look_at_buckets, 1, view)


def test_bucket_keys_depend_on_names_only() -> None:
    def key(*names: str) -> str:
        parameters = [torch.zeros(1)] * len(names)
        return GradBucket(torch.zeros(len(names)), parameters, names).key

    assert key("a", "b") == key("a", "b")
    assert key("a", "b") != key("b", "a")
    assert key("ab", "c") != key("a", "bc")


@pytest.mark.parametrize("index", [0, 5])
def test_a_bucket_is_the_last_of_a_step_unless_it_is_not(index: int) -> None:
    def make(**options: bool) -> GradBucket:
        return GradBucket(torch.zeros(1), [torch.zeros(1)], ["a"], index=index, **options)

    assert [make().is_last(), make(is_last=True).is_last(), make(is_last=False).is_last()] == [
        True,
        True,
        False,
    ]
    assert make(is_last=False).index() == index


def test_bucket_of_the_wrong_size_raises() -> None:
    with pytest.raises(ValueError, match=r"6 for these parameters, found shape \[5\]"):
        GradBucket(torch.zeros(5), [torch.zeros(2, 3)], ["weight"])
    with pytest.raises(ValueError, match="one name per parameter"):
        GradBucket(torch.zeros(6), [torch.zeros(2, 3)], [])


# ------------------------------------------------------------------------------------ errors

HookFn = Callable[[Any, GradBucket], Any]


def average(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def raise_early(state: Any, bucket: GradBucket) -> Any:
    raise KeyError("early")


def raise_in_callback(state: Any, bucket: GradBucket) -> Any:
    def fail(future: Any) -> Any:
        raise ValueError("late")

    return average(state, bucket).then(fail)


def set_exception(state: Any, bucket: GradBucket) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_exception(LookupError("set"))
    return future


def completed(value: Any) -> HookFn:
    def hook(state: Any, bucket: GradBucket) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(value(bucket.buffer()))
        return future

    return hook


BAD_HOOKS: dict[str, tuple[HookFn, type[Exception], str]] = {
    "raises": (raise_early, KeyError, "early"),
    "raises in a callback": (raise_in_callback, RuntimeError, "late"),
    "sets an exception": (set_exception, LookupError, "set"),
    "returns no future": (
        lambda state, bucket: bucket.buffer(),
        RuntimeError,
        "Expected the communication hook to return a torch.futures.Future, found.*Tensor",
    ),
    "returns a list": (completed(lambda b: [b]), TypeError, "one tensor, found.*list"),
    "returns None": (completed(lambda b: None), TypeError, "one tensor, found.*NoneType"),
    "returns another size": (completed(lambda b: b[:-1]), RuntimeError, "expected 17 .*found 16"),
    "returns integers": (completed(lambda b: b.int()), RuntimeError, "Float.*found.*Int"),
    "returns another device": (completed(lambda b: b.to("meta")), RuntimeError, "cpu, found.*meta"),
}


def recover_from(rank: int, world_size: int, name: str, view: bool) -> str:
    bad, error, text = BAD_HOOKS[name]
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 1), gradient_as_bucket_view=view)
    current: HookFn = average
    model.register_comm_hook(None, lambda state, bucket: current(state, bucket))
    x = torch.full((1, 16), float(rank))

    def step() -> torch.Tensor:
        model.zero_grad()
        model(x).sum().backward()
        assert model.module.weight.grad is not None
        return model.module.weight.grad

    expected = torch.full((1, 16), sum(range(world_size)) / world_size)
    assert torch.equal(step(), expected)
    current = bad
    with pytest.raises(error, match=text) as caught:
        step()
    current = average
    for _ in range(2):
        assert torch.equal(step(), expected)
    return "\n".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("name", BAD_HOOKS)
@pytest.mark.parametrize("view", [False, True])
def test_after_a_bad_hook_the_next_step_works(name: str, view: bool) -> None:
    notes = run_ranks(recover_from, 2, name, view)
    if BAD_HOOKS[name][1] is not RuntimeError:
        assert all("hook of bucket 0 (parameters bias ... weight)" in note for note in notes)


class Explode(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Explode.armed:
            raise ArithmeticError("in the middle of backward")
        return grad


def exception_in_backward(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    net = nn.Sequential(first, last)
    net.forward = lambda x: last(Explode.apply(first(x)))  # type: ignore[method-assign]
    model = DistributedDataParallel(net, bucket_cap_mb=0.0001)
    x = torch.full((1, 8), float(rank + 1))

    def step() -> torch.Tensor:
        model.zero_grad()
        model(x).sum().backward()
        assert first.weight.grad is not None
        return first.weight.grad.clone()

    step()
    expected = step()
    Explode.armed = True
    with pytest.raises(ArithmeticError, match="middle"):
        step()  # after the bucket of `last` has been launched
    Explode.armed = False
    assert torch.equal(step(), expected)


def test_after_an_exception_in_backward_the_next_step_works() -> None:
    run_ranks(exception_in_backward, 2)


def change_hook_in_backward(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    errors = []

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        try:
            model.reducer.set_hook(lambda bucket: None)  # type: ignore[arg-type,return-value]
        except RuntimeError as error:
            errors.append(str(error))
        return average(state, bucket)

    model.register_comm_hook(None, hook)
    model(torch.ones(1, 2)).sum().backward()
    assert "between two steps" in errors[0]


def test_hooks_can_change_only_between_steps() -> None:
    run_ranks(change_hook_in_backward, 1)


def test_hooks_must_be_callable() -> None:
    run_ranks(_uncallable_hook, 1)


def _uncallable_hook(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="native hook or a callable"):
        model.reducer.set_hook(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 3)  # type: ignore[arg-type]
    model.register_comm_hook(None, average)
    with pytest.raises(RuntimeError, match=r"only be called once.*commhooks\.register"):
        model.register_comm_hook(None, average)


def batched_copies(rank: int, world_size: int) -> None:
    runs = [
        train(
            DistributedDataParallel(
                conv_net(), bucket_cap_mb=SMALL_BUCKETS_MB, batched_grad_copy=is_batched
            ),
            rank,
        )
        for is_batched in (False, True)
    ]
    assert_same(runs[0], runs[1], world_size)


def test_batched_grad_copy_is_accepted_and_changes_nothing() -> None:
    run_ranks(batched_copies, 2)


def local_steps(rank: int, world_size: int) -> None:
    """Libraries set ``require_backward_grad_sync`` themselves, as ``no_sync()`` does."""
    of_wrappers = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        model = wrapper(conv_net(), bucket_cap_mb=SMALL_BUCKETS_MB)
        seen = []
        for step in range(4):
            model.require_backward_grad_sync = step % 2 == 1
            model(torch.full((4, 3, 8, 8), rank + step + 1.0)).square().mean().backward()
            seen += [p.grad.clone() for p in model.parameters()]
        of_wrappers.append(seen)
        with model.no_sync():
            assert model.require_backward_grad_sync is False
        assert model.require_backward_grad_sync is True
    assert_same(of_wrappers[0], of_wrappers[1], world_size)


def test_steps_without_require_backward_grad_sync_are_local() -> None:
    run_ranks(local_steps, 2)


def builtin_hooks(rank: int, world_size: int) -> None:
    for kind in (BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS):
        runs = []
        for wrapper in (DistributedDataParallel, TorchDDP):
            model = wrapper(conv_net(), bucket_cap_mb=SMALL_BUCKETS_MB)
            model._register_builtin_comm_hook(kind)
            runs.append(train(model, rank))
        for ours, theirs in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-5)
        in_halves = all(torch.equal(it, it.half().float()) for it in runs[0][: len(runs[0]) // 2])
        assert in_halves == (kind == BuiltinCommHookType.FP16_COMPRESS)


def test_builtin_hooks_average_as_in_torch() -> None:
    run_ranks(builtin_hooks, 2)


def clear_earlier(rank: int, world_size: int, way: str) -> None:
    """A hook on a later gradient frees an earlier one, as LOMO's does, and its memory is reused."""

    def gradients(wrapper: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
        model = wrapper(net)
        others: list[torch.Tensor] = []

        def clear(grad: torch.Tensor) -> torch.Tensor:
            assert net[1].weight.grad is not None
            if way == "data":
                net[1].weight.grad.data = torch.zeros(200, 200)
            else:
                net[1].weight.grad = None
            others.extend(torch.full((200, 200), 7.0) for _ in range(4))
            return grad

        net[0].weight.register_hook(clear)
        seen = []
        for step in range(3):
            model.zero_grad()
            model(torch.full((1, 200), 1.0 + rank + step)).sum().backward()
            seen += [p.grad.clone() for p in net.parameters()]
        return seen

    assert_same(gradients(DistributedDataParallel), gradients(TorchDDP), world_size)


@pytest.mark.parametrize("way", ["grad", "data"])
def test_gradients_that_a_hook_frees_are_averaged_nevertheless(way: str) -> None:
    run_ranks(clear_earlier, 2, way)


def clip_after_packing(rank: int, world_size: int, options: dict[str, Any], hook: str) -> None:
    """Replace a gradient whose bucket a hook may have averaged already."""
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    for layer in net:
        nn.init.eye_(layer.weight)
    model = DistributedDataParallel(net, **options)
    if hook:
        commhooks.register(model, hook)
    first, last = net[0].weight, net[1].weight
    clipped = []

    def clip(_: torch.Tensor) -> None:
        assert last.grad is not None
        last.grad = last.grad.clamp(max=100.0)
        clipped.append(last.grad)

    first.register_post_accumulate_grad_hook(clip)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        for parameter in (first, last):
            torch.testing.assert_close(parameter.grad, torch.full((2, 2), 1.5))
        assert last.grad is clipped[-1]


@pytest.mark.parametrize("hook", ["", "fp16", "int8"])
@pytest.mark.parametrize("host_memory", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("megabytes", [1e-6, 1])
def test_gradients_that_are_replaced_after_they_were_packed(
    megabytes: float, view: bool, host_memory: bool, hook: str
) -> None:
    options = {
        "bucket_cap_mb": megabytes,
        "gradient_as_bucket_view": view,
        "host_memory": host_memory,
    }
    run_ranks(clip_after_packing, 2, options, hook)


def look_at_a_gradient(rank: int, world_size: int) -> None:
    """Read a gradient in a hook and after an exception, before its bucket is full."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer in net:
        nn.init.eye_(layer.weight)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    seen = []
    net[0].weight.register_hook(lambda _: seen.append(net[1].weight.grad.clone()))
    for step in range(4):
        model.zero_grad()
        own = torch.full((2, 2), 1.0 + rank + step)
        model(own[:1]).sum().backward()
        assert seen[-1].equal(own)
        assert net[1].weight.grad.equal(torch.full((2, 2), 1.5 + step))
    model.zero_grad()
    net[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(own[:1] + 5).sum().backward()
    assert net[1].weight.grad.equal(own + 5)


def test_views_of_a_bucket_are_never_those_of_an_earlier_step() -> None:
    run_ranks(look_at_a_gradient, 2)


@dataclass
class Keep(commhooks.CommHook):
    """Return the bucket as it is."""

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> torch.Tensor:
        return bucket.buffer()


def written(rank: int, world_size: int) -> int:
    """Return how often a step writes to a gradient that is a view of its bucket."""
    model = DistributedDataParallel(nn.Linear(16, 1, bias=False), gradient_as_bucket_view=True)
    commhooks.register(model, Keep())
    found = []
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        model(torch.ones(1, 16)).sum().backward()
        assert model.module.weight.grad is not None
        found.append(model.module.weight.grad._version)
    return found[2] - found[1]


def test_an_average_that_is_in_the_bucket_is_not_copied() -> None:
    """Only zero_grad and the engine of autograd write."""
    assert run_ranks(written, 2) == [2, 2]


def half_as_other_half(rank: int, world_size: int) -> torch.Tensor:
    """Gradients in bfloat16, in the memory order of a user, and a hook that sends float16."""
    model = DistributedDataParallel(nn.Linear(6, 4, bias=False).bfloat16())
    commhooks.register(model, "fp16")
    model.module.weight.grad = torch.zeros(6, 4, dtype=torch.bfloat16).t()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
        model(torch.full((1, 6), 1e5 * (1 - rank), dtype=torch.bfloat16)).sum().backward()
    return model.module.weight.grad


def test_gradients_are_scaled_before_they_are_rounded_to_another_half_precision() -> None:
    for found in run_ranks(half_as_other_half, 2):
        torch.testing.assert_close(found, torch.full_like(found, 5e4))


def negated(rank: int, world_size: int) -> torch.Tensor:
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))

    def negate(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return completed(lambda buffer: torch._neg_view(-buffer))(None, bucket)  # type: ignore[no-any-return]

    model.register_comm_hook(None, negate)
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    return model.module.weight.grad


def test_a_hook_may_return_a_tensor_that_is_negated_when_it_is_read() -> None:
    assert all(torch.equal(found, torch.tensor([[1.0, 2.0]])) for found in run_ranks(negated, 1))
