"""Optimizers that step inside backward, with any hook."""

from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def inputs_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + step))


def train(
    rank: int,
    overlapped: bool,
    optimizer: str,
    hook: str | None,
    options: dict[str, Any],
    accumulate: bool,
) -> list[torch.Tensor]:
    kind, arguments = OPTIMIZERS[optimizer]
    model = DistributedDataParallel(make_net(), bucket_cap_mb=0.0001, **options)
    if hook is not None:
        commhooks.register(model, hook)
    if overlapped:
        commhooks.overlap_optimizer(model, kind, **arguments)
    else:
        ordinary = kind(model.parameters(), **arguments)
    for step in range(4):
        if accumulate:
            with model.no_sync():
                model(inputs_of(rank, 10 + step)).square().mean().backward()
        model(inputs_of(rank, step)).square().mean().backward()
        if overlapped:
            assert all(p.grad is None for p in model.parameters())
        else:
            ordinary.step()
            ordinary.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def same_as_after_backward(rank: int, world_size: int, *args: Any) -> None:
    for a, b in zip(train(rank, True, *args), train(rank, False, *args), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_overlapped_steps_equal_steps_after_backward(optimizer: str) -> None:
    run_ranks(same_as_after_backward, 2, optimizer, None, {}, False)


@pytest.mark.covering(2)
@pytest.mark.parametrize("hook", [None, "allreduce", "bf16", "noop", "powersgd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
)
def test_with_hooks_and_accumulation(hook: str | None, options: dict[str, Any]) -> None:
    run_ranks(same_as_after_backward, 2, "SGD", hook, options, True)


def two_optimizers(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(make_net(), bucket_cap_mb=0.0001)
    reference = make_net()
    first, rest = list(model.module[0].parameters()), list(model.module[2].parameters())
    overlapped = commhooks.overlap_optimizer(model, torch.optim.Adam, first, lr=0.01)
    commhooks.overlap_optimizer(model, torch.optim.SGD, rest, lr=0.1)
    adam = torch.optim.Adam(reference[0].parameters(), lr=0.01)
    sgd = torch.optim.SGD(reference[2].parameters(), lr=0.1)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for optimizer in (overlapped.optimizer, adam)
    ]
    for step in range(3):
        model(inputs_of(rank, step)).square().mean().backward()
        assert model.module[4].weight.grad is not None  # of no optimizer
        model.zero_grad()
        reference.zero_grad()
        for peer in range(world_size):
            (reference(inputs_of(peer, step)).square().mean() / world_size).backward()
        adam.step()
        sgd.step()
        for schedule in schedules:
            schedule.step()
    for ours, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert overlapped.optimizer.state_dict().keys() == adam.state_dict().keys()


def test_several_optimizers_over_subsets() -> None:
    run_ranks(two_optimizers, 2)


def steps_before_backward_ends(rank: int, world_size: int) -> bool:
    """Return whether one parameter was stepped before the gradient of another was computed."""
    model = DistributedDataParallel(make_net(), bucket_cap_mb=0.0001)
    commhooks.register(model, "noop")  # completes immediately
    commhooks.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    last = model.module[4].weight
    before = last.detach().clone()
    changed: list[bool] = []
    model.module[0].weight.register_hook(lambda _: changed.append(not torch.equal(last, before)))
    model(inputs_of(rank, 0)).sum().backward()
    return changed[0]


def test_steps_overlap_with_backward() -> None:
    assert run_ranks(steps_before_backward_ends, 2) == [True, True]


def mistakes(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(make_net())
    with pytest.raises(TypeError, match=r"Expected a commhooks\.DistributedDataParallel"):
        commhooks.overlap_optimizer(model.module, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="not one whose gradients the model averages"):
        commhooks.overlap_optimizer(model, torch.optim.SGD, [nn.Parameter(torch.ones(2))], lr=0.1)
    overlapped = commhooks.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r'"0\.weight" is stepped in backward by another'):
        commhooks.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    overlapped.remove()
    model(inputs_of(rank, 0)).sum().backward()
    assert model.module[0].weight.grad is not None
    commhooks.overlap_optimizer(model, torch.optim.SGD, lr=0.1)


def test_mistakes_raise() -> None:
    run_ranks(mistakes, 1)


def torchs_names(rank: int, world_size: int) -> None:
    """``_register_fused_optim`` keeps gradients; ``_apply_optimizer_in_backward`` clears them."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    models = [DistributedDataParallel(make_net()) for _ in range(2)]
    models[0]._register_fused_optim(torch.optim.SGD, 0.1)
    _apply_optimizer_in_backward(torch.optim.SGD, models[1].module.parameters(), {"lr": 0.1})
    reference = make_net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        for model in models:
            model(inputs_of(rank, step)).square().mean().backward()
        assert models[0].module[0].weight.grad is not None
        assert models[1].module[0].weight.grad is None
        models[0].zero_grad()
        optimizer.zero_grad()
        for peer in range(world_size):
            (reference(inputs_of(peer, step)).square().mean() / world_size).backward()
        optimizer.step()
    for model in models:
        for ours, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore")
def test_torchs_names_for_overlapped_optimizers() -> None:
    run_ranks(torchs_names, 2)


def added_later(rank: int, world_size: int) -> None:
    models = [DistributedDataParallel(make_net(), bucket_cap_mb=0.0001) for _ in range(2)]
    ours, theirs = ([*model.module[0].parameters()] for model in models)
    rest = [[*model.module[2:].parameters()] for model in models]
    overlapped = commhooks.overlap_optimizer(models[0], torch.optim.Adam, ours, lr=0.01)
    after = torch.optim.Adam(theirs, lr=0.01)
    for step in range(5):
        if step == 2:
            overlapped.optimizer.add_param_group({"params": rest[0], "lr": 0.1})
            after.add_param_group({"params": rest[1], "lr": 0.1})
            with pytest.raises(ValueError, match="is stepped in backward by another"):
                commhooks.overlap_optimizer(models[0], torch.optim.SGD, rest[0], lr=0.1)
        for model in models:
            model.zero_grad()
            model(inputs_of(rank, step)).square().mean().backward()
        after.step()
    for a, b in zip(*(model.module.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def test_groups_that_are_added_later_are_stepped() -> None:
    run_ranks(added_later, 2)
