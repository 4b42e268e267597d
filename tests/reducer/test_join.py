"""Uneven inputs: ranks without inputs take part in the steps of the others."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import same_on_all_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel

WRAPPERS = (DistributedDataParallel, TorchDDP)


class Net(nn.Module):
    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        if buffer:
            self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "steps"):
            self.steps += 1
        return self.layers(x)


def inputs_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + step))


def train(
    wrapper: Any, rank: int, steps: list[int], divide_by_initial: bool, options: dict[str, Any]
) -> list[torch.Tensor]:
    """Train with ``steps[rank]`` inputs; return all gradients of this rank, then parameters."""
    model = wrapper(Net(), bucket_cap_mb=0.0001, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with model.join(divide_by_initial_world_size=divide_by_initial):
        for step in range(steps[rank]):
            optimizer.zero_grad()
            model(inputs_of(rank, step)).square().mean().backward()
            seen += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
    return seen + [p.detach().clone() for p in model.parameters()]


def same_as_torch(
    rank: int, world_size: int, steps: list[int], divide: bool, options: dict[str, Any]
) -> None:
    ours, theirs = (train(wrapper, rank, steps, divide, options) for wrapper in WRAPPERS)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(
    ("steps", "options"),
    [
        ([2, 5], {}),
        ([5, 2], {"gradient_as_bucket_view": True}),
        ([1, 4, 2], {}),
        ([4, 2], {"find_unused_parameters": True}),
        ([3, 1], {"static_graph": True}),
    ],
)
def test_gradients_equal_torchs(steps: list[int], options: dict[str, Any], divide: bool) -> None:
    run_ranks(same_as_torch, len(steps), steps, divide, options)


def join_at_once(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """A rank without any input in the first epoch has inputs in the second epoch."""
    model = DistributedDataParallel(Net(), **options)
    for epoch in range(2):
        with model.join():
            for step in range(3 if rank == 0 or epoch else 0):
                model.zero_grad()
                model(inputs_of(rank, step)).sum().backward()
    assert same_on_all_ranks(model.module.layers[0].weight.grad)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_a_rank_without_inputs_in_the_first_epoch(options: dict[str, Any]) -> None:
    run_ranks(join_at_once, 2, options)


def with_hook(rank: int, world_size: int, name: str, options: dict[str, Any]) -> None:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    handle = commhooks.register(model, name, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(inputs_of(rank, step)).square().mean().backward()
            optimizer.step()
    assert model.reducer.steps == 4  # including shadowed steps
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert same_on_all_ranks(parameters)
    for step in range(2):  # all ranks continue
        optimizer.zero_grad()
        model(inputs_of(rank, step)).square().mean().backward()
    assert handle.stats().total.gradient_bytes > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allreduce", {}),
        ("bf16", {}),
        ("noop", {}),
        ("powersgd", {"rank": 2, "start_step": 1, "min_compression_rate": 0.5}),
        ("powersgd", {"rank": 2, "start_step": 0, "two_sided": False}),
        ("batched_powersgd", {"rank": 2, "start_step": 0}),
        ("int8", {}),
        ("onebit", {}),
        ("topk", {"density": 0.2, "warmup_steps": 1}),
        ("shared_topk", {"density": 0.2, "warmup_steps": 1}),
        ("threshold", {"value": 0.01}),
        ("randomk", {"density": 0.5}),
        ("demo", {"density": 0.5, "tile": 4}),
        ("dgc", {"density": 0.5}),
        ("hierarchical", {"inner": "int8", "ranks_per_node": 1}),
        ("error_feedback", {"inner": "bf16"}),
        ("schedule", {"stages": [[0, "allreduce"], [2, "int4"]]}),
        ("route", {"rules": [["*bias", "allreduce"]], "default": "int8"}),
    ],
)
def test_hooks_of_shadowing_ranks_get_zeros(name: str, options: dict[str, Any]) -> None:
    run_ranks(with_hook, 2, name, options)


def buffers(rank: int, world_size: int) -> tuple[float, float]:
    model = DistributedDataParallel(Net(buffer=True))
    model.module.steps += 10 * rank  # the first forward broadcasts those of rank 1
    with model.join():
        for step in range(2 + 3 * rank):
            model(inputs_of(rank, step)).sum().backward()
    during = model.module.steps.item()
    return during, sum(p.sum().item() for p in model.parameters())


def test_buffers_and_model_follow_the_last_rank() -> None:
    (first, one), (second, two) = run_ranks(buffers, 2)
    assert (first, one) == (second, two)
    assert second == 15


def throw(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Net())
    seen = 0

    def epoch() -> None:
        nonlocal seen
        with model.join(throw_on_early_termination=True):
            for step in range(2 + 2 * rank):
                model(inputs_of(rank, step)).sum().backward()
                seen += 1

    with pytest.raises(RuntimeError, match="exhausted"):
        epoch()
    assert seen == 2
    model.zero_grad()
    model(inputs_of(rank, 0)).sum().backward()


def test_early_termination_raises_on_all_ranks() -> None:
    run_ranks(throw, 2)


def several(rank: int, world_size: int) -> None:
    models = [DistributedDataParallel(Net()) for _ in range(2)]
    with Join(models):
        for step in range(1 + 2 * rank):
            for model in models:
                model(inputs_of(rank, step)).square().sum().backward()
    for model in models:
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert same_on_all_ranks(parameters)


def test_several_models_join_together() -> None:
    run_ranks(several, 2)


def accumulate(rank: int, world_size: int) -> torch.Tensor:
    model = DistributedDataParallel(Net())
    with model.join():
        for step in range(2 + 2 * rank):
            with model.no_sync():
                model(inputs_of(rank, step)).sum().backward()
            model(inputs_of(rank, step)).sum().backward()
    return model.module.layers[0].weight.detach()


def test_shadowing_with_gradient_accumulation() -> None:
    assert torch.equal(*run_ranks(accumulate, 2))


class Branches(Net):
    """Uses one of two branches in each step, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        return (self.others if step % 3 else self.layers)(x)


def skip_unused(rank: int, world_size: int, skips: bool, hook: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(
        Branches(),
        bucket_cap_mb=0.0001,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=skips,
    )
    handle = commhooks.register(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(3 + 4 * rank):
            optimizer.zero_grad()
            model(inputs_of(rank, step), step).square().mean().backward()
            optimizer.step()
    for step in range(2):  # all ranks continue
        model(inputs_of(rank, step), step).square().mean().backward()
    assert handle.stats().total.gradient_bytes > 0
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("hook", ["allreduce", {"name": "skip_nonfinite", "inner": "allreduce"}])
def test_shadowing_ranks_skip_the_same_buckets(hook: Any) -> None:
    averaged, skipped = (run_ranks(skip_unused, 2, skips, hook) for skips in (0, 1))
    for expected, found in zip(averaged[0] + averaged[1], skipped[0] + skipped[1], strict=True):
        torch.testing.assert_close(found, expected)


def divide_by_active(rank: int, world_size: int, hook: str) -> torch.Tensor:
    model = DistributedDataParallel(Net())
    handle = commhooks.register(model, hook)
    with pytest.raises(ValueError, match="leaves gradients as they are"):
        model.join(divide_by_initial_world_size=False)
    handle.remove()
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            model.zero_grad()
            model(inputs_of(0, 0)).sum().backward()
    gradient = model.module.layers[0].weight.grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("hook", ["local_sgd", "diloco", "gossip", "push_sum"])
def test_hooks_that_average_parameters_keep_gradients(hook: str) -> None:
    _, alone = run_ranks(divide_by_active, 2, hook)
    assert torch.equal(alone, run_ranks(divide_by_active, 1, hook)[0])


def disabled(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Net())
    with model.join(enable=False):
        for step in range(2):
            model(inputs_of(rank, step)).sum().backward()


def test_join_can_be_disabled() -> None:
    run_ranks(disabled, 2)


def join_with_experts(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = DistributedDataParallel(
        Net(),
        group_key=lambda name, _: "layers.2" in name,
        key_process_groups={True: groups[rank]},
    )
    with pytest.raises(ValueError, match=r"not all share .* key_process_groups"):
        model.join()
    expert = model.module.layers[2]
    with torch.no_grad():
        expert.weight.fill_(float(rank))
    for step in range(3):
        model.zero_grad()
        model(inputs_of(rank, step)).square().mean().backward()
    equal = [same_on_all_ranks(p.grad) for p in model.parameters()]
    assert equal == [True, True, False, False]
    assert torch.equal(expert.weight, torch.full((3, 7), float(rank)))


def test_experts_are_not_overwritten_by_those_of_the_last_rank() -> None:
    run_ranks(join_with_experts, 2)
