"""Training loops that a hook cannot follow."""

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.of_ranks import gathered
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks import DistributedDataParallel
from commhooks.errors import CommHookError

WRAPPERS = [DistributedDataParallel, TorchDDP]
CHANGING = [("diloco", {"period": 4}), ("local_sgd", {"period": 4}), ("gossip", {})]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def wrapped(wrapper: Any, hook: str, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = wrapper(net())
    commhooks.register(model, hook, **options)
    torch.manual_seed(model.process_group.rank())
    return model, torch.optim.SGD(model.parameters(), 0.1)


def loss_of(model: nn.Module) -> Tensor:
    output: Tensor = model(torch.randn(3, 4))
    return output.square().mean()


def step_backwards_twice(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(8):
        synchronized = loss_of(model)
        with model.no_sync():
            local = loss_of(model)
        synchronized.backward()
        local.backward()
        optimizer.step()
        optimizer.zero_grad()


def backwards_after_a_synchronized_one(
    rank: int, world_size: int, wrapper: Any, hook: str, options: dict[str, Any]
) -> None:
    model, optimizer = wrapped(wrapper, hook, **options)
    says = f"{hook}.*changed some in step.*call backward once"
    with pytest.raises(CommHookError, match=says):
        step_backwards_twice(model, optimizer)
    optimizer.zero_grad()
    for step in range(8):
        with model.no_sync():
            local = loss_of(model)
            if step % 2:  # both ways that the error names
                local.backward()
        loss = loss_of(model)
        (loss if step % 2 else loss + local).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("hook", "options"), CHANGING)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_backwards_after_a_change_of_the_parameters(
    run_ranks: Any, wrapper: Any, hook: str, options: dict[str, Any]
) -> None:
    run_ranks(backwards_after_a_synchronized_one, 2, wrapper, hook, options)


def copies_and_removal(rank: int, world_size: int, wrapper: Any) -> None:
    model, _ = wrapped(wrapper, "gossip")
    loss_of(model).backward()
    for each in (copy.deepcopy(model), model):
        with torch.no_grad():
            each(torch.randn(3, 4))
    assert model._forward_hooks
    commhooks.handle_of(model).replace("int8")
    assert not model._forward_hooks
    commhooks.handle_of(model).replace("gossip")
    commhooks.handle_of(model).remove()
    assert not model._forward_hooks


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_copies_and_removal(run_ranks: Any, wrapper: Any) -> None:
    run_ranks(copies_and_removal, 2, wrapper)


def discriminator(rank: int, world_size: int, hook: str, way: str) -> list[str]:
    """Return the warnings of a training with a discriminator under ``model``."""
    model, optimizer = wrapped(DistributedDataParallel, hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            model.requires_grad_(way != "frozen")
            if way == "frozen":
                model(torch.randn(3, 4, requires_grad=True)).mean().backward()
            elif way == "no_sync":
                with model.no_sync():
                    loss_of(model).backward()
            elif way == "discarded" or (way == "overflow" and step < 6):
                loss_of(model).backward()
            optimizer.zero_grad()
            model.requires_grad_(True)
            loss_of(model).backward()
            if not (way == "overflow" and step < 6):
                optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("hook", "way", "warned"),
    [
        ("int4", "discarded", True),
        ("onebit", "discarded", True),
        ("int4", "frozen", False),
        ("int4", "no_sync", False),
        ("int4", "overflow", False),
        ("bf16", "discarded", False),
    ],
)
def test_discarded_gradients(run_ranks: Any, hook: str, way: str, warned: bool) -> None:
    first, second = run_ranks(discriminator, 2, hook, way)
    assert second == []
    assert len(first) == warned
    if warned:
        assert f"'{hook}'" in first[0]
        assert "no_sync()" in first[0]


def cached_gradients(rank: int, world_size: int) -> None:
    """GradCache, as sentence-transformers uses it: a contrastive loss over the batches of all."""
    results = []
    for wrapper in WRAPPERS:
        model = wrapper(net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            chunks = torch.randn(8, 4).chunk(4)
            with torch.no_grad():
                embeddings = torch.cat([model(chunk) for chunk in chunks]).requires_grad_()
            of_ranks = gathered(embeddings)
            of_ranks[rank] = embeddings
            similarities = torch.cat(of_ranks) @ torch.cat(of_ranks).T
            similarities.logsumexp(1).mean().backward()
            for number, gradient in enumerate(embeddings.grad.chunk(4)):
                with model.no_sync() if number < 3 else nullcontext():
                    (model(chunks[number]) * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_cached_gradients(run_ranks: Any) -> None:
    run_ranks(cached_gradients, 2)


def is_freed(rank: int, world_size: int, hook: str) -> bool:
    model, optimizer = wrapped(DistributedDataParallel, hook)
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    adapter = weakref.ref(commhooks.handle_of(model).adapter)
    gc.collect()
    gc.disable()
    del model, optimizer
    freed = adapter() is None
    gc.enable()
    return freed


@pytest.mark.parametrize("hook", ["int8", "gossip"])
def test_checks_do_not_keep_a_dropped_model(run_ranks: Any, hook: str) -> None:
    """Not even until the next collection of garbage."""
    assert run_ranks(is_freed, 2, hook) == [True, True]
