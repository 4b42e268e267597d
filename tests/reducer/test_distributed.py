"""Construction of the wrapper, its buffers and process groups."""

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import gathered
from support.torchs_wrapper import without_unknown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commhooks.testing import run_ranks
from reducer import DistributedDataParallel, MixedPrecision

# -------------------------------------------------------------------------------- construction


def start_up(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[1].running_mean.fill_(rank)
    original = net[0].weight.detach().clone()
    model = DistributedDataParallel(net)
    weights = gathered(net[0].weight)
    assert torch.equal(weights[0], weights[1])
    assert net[1].running_mean.eq(0).all()
    assert rank != 0 or torch.equal(net[0].weight, original)
    assert set(model.state_dict()) == {f"module.{name}" for name in net.state_dict()}


def test_ranks_start_from_rank_0() -> None:
    run_ranks(start_up, 2)


def no_init_sync(rank: int, world_size: int) -> None:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, rank)
    DistributedDataParallel(net, init_sync=False)
    assert net.weight.eq(rank).all()


def test_init_sync_can_be_disabled() -> None:
    run_ranks(no_init_sync, 2)


def different_model(kind: str, rank: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(3, 4), nn.Conv2d(2, 3, 3)]
    layers[0].teacher = nn.Linear(3, 4).requires_grad_(False)
    if rank == 1:
        match kind:
            case "shape":
                layers[0] = nn.Linear(3, 5)
            case "dtype":
                layers[0] = layers[0].double()
            case "strides":
                layers[1] = layers[1].to(memory_format=torch.channels_last)
            case "count":
                layers.append(nn.Linear(2, 2))
            case "frozen":
                layers[0].weight.requires_grad_(False)
            case "teacher":
                layers[0].teacher = nn.Linear(3, 5).requires_grad_(False)
            case "cache":
                layers[1].register_buffer("cache", torch.zeros(2))
    return nn.Sequential(*layers)


def mismatch(rank: int, world_size: int, kind: str) -> str:
    with pytest.raises(RuntimeError, match="different parameters") as caught:
        DistributedDataParallel(different_model(kind, rank))
    # The process group still works.
    DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("shape", ['"0.weight" (shape [4, 3]', '"0.weight" (shape [5, 3]', "rank 1"]),
        ("dtype", ["torch.float32", "torch.float64", "rank 1"]),
        ("strides", ['"1.weight"', "[18, 9, 3, 1]", "[18, 1, 6, 2]", "rank 1"]),
        ("count", ["entry 4 of the parameters and buffers is frozen", '"2.weight"', "rank 1"]),
        ("teacher", ['frozen "0.teacher.weight" (shape [4, 3]', "(shape [5, 3]", "rank 1"]),
        ("cache", ["6 with the buffers on rank 0, 7 on rank 1", 'buffer "1.cache"', "to_ignore"]),
        ("frozen", ['entry 0 of the parameters and buffers is "0.weight"', '"0.bias"', "rank 1"]),
    ],
)
def test_models_that_differ_raise_on_every_rank(kind: str, texts: list[str]) -> None:
    for message in run_ranks(mismatch, 2, kind):
        for text in texts:
            assert text in message


def bad_arguments(rank: int, world_size: int) -> None:
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        DistributedDataParallel(nn.ReLU())
    with pytest.raises(RuntimeError, match=r'uninitialized parameters can.t be used.*"0\.weight"'):
        DistributedDataParallel(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ValueError, match=r"on one GPU; found device_ids=\[0\]"):
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])
    with pytest.raises(ValueError, match=r"on one GPU; found device_ids=None, output_device=0"):
        DistributedDataParallel(nn.Linear(2, 2), output_device=0)
    with pytest.raises(
        ValueError, match=r"keys that group_key gives to no parameter: \['expert'\]"
    ):
        DistributedDataParallel(nn.Linear(2, 2), key_process_groups={"expert": dist.group.WORLD})
    with pytest.raises(ValueError, match="Bucket sizes must be finite and not negative, found"):
        DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=-1)
    for precision in ("bf16", torch.bfloat16, MixedPrecision("bf16")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=re.escape(f"; found {precision!r}")):
            DistributedDataParallel(nn.Linear(2, 2), mixed_precision=precision)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r'"0\.weight" is on cpu, "1\.weight" on meta'):
        DistributedDataParallel(mixed)
    with pytest.raises(TypeError, match="unexpected keyword argument 'hook'"):
        DistributedDataParallel(nn.Linear(2, 2), hook="bf16")  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_bad_arguments() -> None:
    run_ranks(bad_arguments, 1)


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        DistributedDataParallel(nn.Linear(2, 2))


# -------------------------------------------------------------------------------------- buffers


class Counter(nn.Module):
    """A module that replaces its buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.sum()
        return self.weight * x


def buffers(rank: int, world_size: int, options: dict[str, bool]) -> list[float]:
    model = DistributedDataParallel(Counter(), **options)
    history = []
    for _ in range(2):
        model(torch.full((2,), float(rank + 1))).sum().backward()
        history.append(model.module.seen.item())
    with model.no_sync():
        model(torch.full((2,), float(rank + 1))).sum().backward()
    return [*history, model.module.seen.item()]


def test_buffers_follow_rank_0() -> None:
    # Before each forward that follows a synchronized one, including the first under no_sync(), rank
    # 1 gets the value of rank 0: 0, 2, 4. It adds 4 each time.
    assert run_ranks(buffers, 2, {}) == [[2, 4, 6], [4, 6, 8]]


@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffer_synchronization_can_be_disabled(option: str) -> None:
    assert run_ranks(buffers, 2, {option: False}) == [[2, 4, 6], [4, 8, 12]]


def initial_buffers(rank: int, world_size: int, options: dict[str, bool]) -> None:
    values = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        module = Counter()
        module.seen += rank
        wrapper(module, **options)
        values.append(module.seen.item())
    assert values[0] == values[1]


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_are_broadcast_at_the_start_when_torch_does(option: str) -> None:
    run_ranks(initial_buffers, 2, without_unknown({option: False}))


# --------------------------------------------------------------------------------------- groups


def subgroups(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False), process_group=groups[rank // 2])
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
        expected = 0.5 if rank < 2 else 2.5
        assert model.module.weight.grad.eq(expected).all()


def test_ranks_of_a_group_average_among_themselves() -> None:
    run_ranks(subgroups, 4)


def several_models(rank: int, world_size: int) -> None:
    one, two = (DistributedDataParallel(nn.Linear(2, 2, bias=False)) for _ in range(2))
    x = torch.full((1, 2), float(rank))
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        y = one(x).sum() + 3 * two(2 * x).sum()
        y.backward()
        assert one.module.weight.grad.eq(0.5).all()
        assert two.module.weight.grad.eq(3.0).all()


def test_several_models_in_one_process() -> None:
    run_ranks(several_models, 2)


def two_backwards(rank: int, world_size: int) -> None:
    """Two heads with a loss and a backward each: together they are one step."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    model = DistributedDataParallel(Heads())
    for _ in range(2):
        model.zero_grad()
        a, b = model(torch.full((1, 2), float(rank)))
        a.sum().backward()
        b.sum().backward()
        assert model.module.a.weight.grad.eq(0.5).all()
        assert model.module.b.weight.grad.eq(0.5).all()


def test_one_forward_two_backwards() -> None:
    run_ranks(two_backwards, 2)


def forward_without_backward(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False))
    x = torch.full((1, 2), float(rank))
    for _ in range(3):
        model.zero_grad()
        model(x)
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
        assert model.module.weight.grad.eq(0.5).all()


def test_forwards_without_backward_have_no_effect() -> None:
    run_ranks(forward_without_backward, 2)


def frozen(rank: int, world_size: int) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    model(torch.ones(1, 2)).sum().backward()
    assert net[0].weight.grad is None
    assert net[1].weight.grad is not None


def test_frozen_parameters_are_not_averaged() -> None:
    run_ranks(frozen, 2)


def ignored(rank: int, world_size: int) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    net._ddp_params_and_buffers_to_ignore = ["0.weight"]
    nn.init.constant_(net[0].weight, rank + 1)
    model = DistributedDataParallel(net)
    assert net[0].weight.eq(rank + 1).all()
    model(torch.ones(1, 2)).sum().backward()
    names: list[Any] = [row["names"] for row in model.reducer.bucket_stats()]
    assert names == [["1.weight", "0.bias"]]


def test_ignored_parameters_are_not_averaged() -> None:
    run_ranks(ignored, 2)


@dataclasses.dataclass
class Linked:
    value: torch.Tensor
    previous: "Linked | None" = None


def linked_outputs(rank: int, world_size: int, links: int) -> None:
    """Torch's wrapper searches outputs with ``find_unused_parameters`` only."""

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> Linked:
            output = Linked(super().forward(x))
            output.previous = output  # a cycle
            for _ in range(links):
                output = Linked(torch.zeros(()), output)
            return output

    model = DistributedDataParallel(Net(2, 1), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        output: Any = model(torch.full((1, 2), 1.0 + rank + step))
        for _ in range(links):
            output = output.previous
        output.value.sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((1, 2), 1.5 + step))


@pytest.mark.parametrize("links", [0, 5000])
def test_outputs_that_are_linked_in_a_cycle_or_deeply(links: int) -> None:
    run_ranks(linked_outputs, 2, links)
