"""Mistakes that torch's wrapper detects: the same type of exception, and as much information."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Outputs:
    used: torch.Tensor
    unused: torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = "plain"

    def forward(self, x: torch.Tensor) -> Any:
        if self.how == "first only":
            return self.first(x)
        if self.how == "twice":
            return self.second(self.second(self.first(x)))
        if self.how == "reentrant":
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.second, x, use_reentrant=True)
            return x
        if self.how == "two outputs":
            return self.first(x), self.second(x)
        if self.how == "dataclass":
            return Outputs(self.first(x), self.second(x))
        if self.how == "object":
            return SimpleNamespace(used=self.first(x))
        return self.second(self.first(x))


def backward(model: Any, how: str = "plain") -> None:
    model.module.how = how
    output = model(torch.ones(2, 4, requires_grad=True))
    if isinstance(output, tuple):
        output = output[0]
    output = getattr(output, "used", output)
    output.sum().backward()


def unfinished(wrapper: Any) -> None:
    model = wrapper(Net())
    backward(model, "first only")
    backward(model)


def ready_twice(wrapper: Any) -> None:
    backward(wrapper(Net()), "reentrant")


def more_gradients(wrapper: Any) -> None:
    model = wrapper(Net(), static_graph=True)
    backward(model, "plain")
    backward(model, "reentrant")


def penalty(model: Any, *, with_outputs: bool = False) -> None:
    """The loss is a derivative, on which biases have no influence."""
    x = torch.ones(2, 4, requires_grad=True)
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (slope.square().sum() + (0 * output.sum() if with_outputs else 0)).backward()


def penalty_alone(wrapper: Any) -> None:
    model = wrapper(Net(), find_unused_parameters=True)
    penalty(model)
    penalty(model)


def unused_attribute(wrapper: Any) -> None:
    model = wrapper(Net(), find_unused_parameters=True)
    backward(model, "dataclass")
    backward(model)


def output_in_an_object(wrapper: Any) -> None:
    backward(wrapper(Net(), find_unused_parameters=True), "object")


def fewer_gradients(wrapper: Any) -> None:
    model = wrapper(Net(), static_graph=True)
    backward(model, "reentrant")
    backward(model, "first only")
    backward(model)


def uninitialized(wrapper: Any) -> None:
    wrapper(nn.Sequential(nn.LazyLinear(3)))


def devices(wrapper: Any) -> None:
    wrapper(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def nothing_to_train(wrapper: Any) -> None:
    wrapper(nn.Linear(2, 2).requires_grad_(False))


def delayed_alone(wrapper: Any) -> None:
    net = Net()
    wrapper(net, delay_all_reduce_named_params=[("first.bias", net.first.bias)])


def several_devices(wrapper: Any) -> None:
    wrapper(Net(), device_ids=[0, 1])


def sample_rate(wrapper: Any) -> None:
    wrapper(Net())._set_ddp_runtime_logging_sample_rate(0)


def hook_that_is_none(wrapper: Any) -> None:
    wrapper(Net()).register_comm_hook(None, 1)


def hook_twice(wrapper: Any) -> None:
    model = wrapper(Net())
    for _ in range(2):
        model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())


MISTAKES: dict[Callable[[Any], None], list[str]] = {
    unfinished: ["Expected to have finished reduction", "find_unused_parameters=True", " second."],
    ready_twice: ["Expected to mark a variable ready only once", " second.", "checkpoint"],
    more_gradients: ["graph has changed", " second.", "static_graph=True", "without it"],
    fewer_gradients: ["graph has changed", "first iteration", " second.", "without static_graph"],
    penalty_alone: ["`find_unused_parameters=True` is enabled", " second.bias", "0 * output.sum()"],
    unused_attribute: ["`find_unused_parameters=True` is enabled", " second.", "in a tuple"],
    output_in_an_object: ["ready only once", " first.", "`find_unused_parameters=True` cannot"],
    uninitialized: ["uninitialized parameters", '"0.weight"', "dummy forward pass"],
    devices: ["same type of devices", '"1.weight"'],
    nothing_to_train: ["is not needed when a module doesn't have any parameter"],
    delayed_alone: ["need to be set at the same time"],
    several_devices: ["device_ids can only be None or contain a single element"],
    sample_rate: ["sample rate should be equal or greater than 1"],
    hook_that_is_none: ["hook must be callable"],
    hook_twice: ["can only be called once"],
}


def make_mistake(rank: int, world_size: int, mistake: Callable[[Any], None]) -> tuple[str, ...]:
    kinds, texts = [], []
    for wrapper in (TorchDDP, DistributedDataParallel):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            mistake(wrapper)
        kinds.append(caught.type.__name__)
        texts.append(str(caught.value))
    # A new wrapper in the same process works.
    model = DistributedDataParallel(Net())
    for _ in range(2):
        model.zero_grad()
        backward(model)
        assert model.module.second.bias.grad.tolist() == [2.0] * 4
    return (*kinds, texts[1])


NOT_ADVISED = {
    unfinished: ["is enabled"],
    penalty_alone: ["passing the keyword argument"],
    unused_attribute: ["passing the keyword argument"],
    fewer_gradients: ["passing the keyword argument", "all `forward`"],
    ready_twice: ["find_unused_parameters"],
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_raise_as_in_torch(mistake: Callable[[Any], None]) -> None:
    for theirs, ours, text in run_ranks(make_mistake, 2, mistake):
        assert ours == theirs
        for part in MISTAKES[mistake]:
            assert part in text
        for part in NOT_ADVISED.get(mistake, []):
            assert part not in text


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"module": nn.Linear}, "module: expected Module, found <class"),
    ({"process_group": "gloo"}, "process_group: expected ProcessGroup or None, found"),
    ({"device_mesh": "data"}, "device_mesh: expected DeviceMesh or None, found"),
    ({"stable_buckets": "no"}, "stable_buckets: expected True or False, found 'no'"),
    ({"bucket_cap_mb": "25"}, "bucket_cap_mb: expected Real or None, found"),
    ({"bucket_cap_mb_list": 3}, "bucket_cap_mb_list: expected Iterable or None, found"),
    ({"bucket_cap_mb_list": [1, "25"]}, "bucket_cap_mb_list: expected Real, found '25'"),
    ({"group_key": 3}, "group_key: expected Callable or None, found"),
    ({"key_process_groups": [1]}, "key_process_groups: expected Mapping or None, found"),
    ({"key_process_groups": {"a": 1}}, "key_process_groups['a']: expected ProcessGroup, found 1"),
    ({"hook": "int8", "hook_options": [1]}, "hook_options: expected Mapping or None, found"),
]


def pass_wrong_types(rank: int, world_size: int) -> None:
    for arguments, text in WRONG_TYPES:
        with pytest.raises(TypeError, match=re.escape(text)):
            commhooks.DistributedDataParallel(**({"module": Net()} | arguments))
    for size in (float("nan"), float("inf"), -1):
        with pytest.raises(ValueError, match=f"finite and not negative, found \\[{size}\\] MiB"):
            DistributedDataParallel(Net(), bucket_cap_mb=size)
    with pytest.raises(TypeError, match="optim_cls: expected Callable, found 'AdamW'"):
        commhooks.overlap_optimizer(DistributedDataParallel(Net()), "AdamW")  # type: ignore[arg-type]


def test_arguments_of_a_wrong_type_are_named() -> None:
    run_ranks(pass_wrong_types, 1)


def follow_advice(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    for _ in range(3):
        penalty(model, with_outputs=True)


def test_a_gradient_penalty_works_with_outputs_in_the_loss() -> None:
    run_ranks(follow_advice, 2)


def recover(rank: int, world_size: int, mistake: str) -> None:
    """The wrapper that raised works afterwards."""
    model = DistributedDataParallel(Net(), static_graph=mistake == "more_gradients")
    backward(model)
    with pytest.raises(RuntimeError):
        backward(model, "reentrant")
    model.zero_grad()
    backward(model)
    assert model.module.second.bias.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize("mistake", ["ready_twice", "more_gradients"])
def test_the_same_wrapper_recovers(mistake: str) -> None:
    run_ranks(recover, 2, mistake)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(1))
        self.unused = nn.ParameterList(torch.ones(1) for _ in range(25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used * x


def leave_unused(rank: int, world_size: int) -> tuple[str, str]:
    texts = []
    for level in (dist.DebugLevel.OFF, dist.DebugLevel.INFO):
        dist.set_debug_level(level)
        try:
            model = DistributedDataParallel(Many())
            model(torch.ones(1)).backward()
            with pytest.raises(RuntimeError) as caught:
                model(torch.ones(1))
        finally:
            dist.set_debug_level(dist.DebugLevel.OFF)
        texts.append(str(caught.value))
    return texts[0], texts[1]


def test_errors_name_20_parameters_and_all_at_the_debug_level_info() -> None:
    for few, all_of_them in run_ranks(leave_unused, 2):
        assert len(re.findall(r"unused\.\d+ \(index", few)) == 20
        assert "unused.19 (index 20) and 5 more" in few
        assert "TORCH_DISTRIBUTED_DEBUG" in few
        assert len(re.findall(r"unused\.\d+ \(index", all_of_them)) == 25
        assert "more" not in all_of_them


# ------------------------------------------------------------------------- graphs that are allowed


def check_graph(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> None:
    runs = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        model = wrapper(Net(), bucket_cap_mb=0.00005, **options)
        seen = []
        for step in range(4):
            model.zero_grad()
            x = torch.full((2, 4), float(rank + step + 1), requires_grad=True)
            if kind == "two forwards":
                (model(x).sum() + 2 * model(x.square()).sum()).backward()
            elif kind == "nested checkpoints":
                model.module.forward = lambda x, net=model.module: checkpoint(
                    lambda y: net.second(checkpoint(net.first, y, use_reentrant=True)),
                    x,
                    use_reentrant=True,
                )
                model(x).sum().backward()
            elif kind == "twice":
                model.module.how = "twice"
                model(x).sum().backward()
            elif kind == "all outputs used":
                model.module.how = "two outputs"
                sum(output.sum() for output in model(x)).backward()
            elif kind == "one output used":
                model.module.how = "two outputs"
                outputs = model(x)
                outputs[step % 2].add_(1).sum().backward()  # modify in place
            elif kind == "unused by rank and step":
                model.module.how = "first only" if (rank + step) % 3 == 0 else "plain"
                model(x).sum().backward()
            seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        runs.append(seen)
    for ours, theirs in zip(*runs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("two forwards", {}),
        ("two forwards", {"static_graph": True}),
        ("nested checkpoints", {"static_graph": True}),
        ("nested checkpoints", {}),
        ("twice", {}),
        ("twice", {"static_graph": True}),
        ("all outputs used", {"find_unused_parameters": True}),
        ("one output used", {"find_unused_parameters": True}),
        ("unused by rank and step", {"find_unused_parameters": True}),
    ],
)
def test_gradients_equal_torchs_for_unusual_graphs(
    size: int, view: bool, kind: str, options: dict[str, Any]
) -> None:
    run_ranks(check_graph, size, kind, options | {"gradient_as_bucket_view": view})
