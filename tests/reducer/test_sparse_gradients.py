"""Gradients of nn.Embedding(sparse=True) and nn.EmbeddingBag(sparse=True)."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel

WRAPPERS = (DistributedDataParallel, TorchDDP)


class Words(nn.Module):
    def __init__(self, bag: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = (nn.EmbeddingBag if bag else nn.Embedding)(11, 4, sparse=True)
        self.other = nn.Embedding(5, 4, sparse=True)
        self.head = nn.Linear(4, 2)
        self.uses_other = True

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        x = x if x.dim() == 2 else x.mean(1)
        if self.uses_other:
            x = x + self.other(words[:, 0] % 5)
        return self.head(x)


def words_of(rank: int, step: int) -> torch.Tensor:
    """Return indices; some occur more than once."""
    return (torch.arange(12).view(3, 4) * (rank + 1) + step) % 11


def train(rank: int, world_size: int, bag: bool, options: dict[str, Any]) -> None:
    of_wrappers = []
    for wrapper in WRAPPERS:
        words = Words(bag)
        del words.other  # with two sparse gradients, torch 2.13 does not return the mean
        words.uses_other = False
        model = wrapper(words, bucket_cap_mb=0.0001, **options)
        seen = []
        for step in range(3):
            model.zero_grad()
            model(words_of(rank, step)).square().sum().backward()
            seen += [p.grad for p in model.parameters()]
        of_wrappers.append(seen)
    for ours, theirs in zip(*of_wrappers, strict=True):
        assert ours.is_sparse == theirs.is_sparse
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=1e-6, atol=1e-7)
    assert of_wrappers[0][0].is_sparse


@pytest.mark.covering(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_gradients_equal_torchs(size: int, bag: bool, options: dict[str, Any]) -> None:
    run_ranks(train, size, bag, options)


def unused_here_and_there(rank: int, world_size: int, hook: str | None) -> None:
    model = DistributedDataParallel(Words(bag=False), find_unused_parameters=True)
    reference = Words(bag=False)
    if hook is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the gradients of")  # hooks do not get them
            commhooks.register(model, hook)
    for step, users in enumerate([(0, 1), (1,), (), (0,)]):
        model.module.uses_other = rank in users
        model.zero_grad()
        model(words_of(rank, step)).square().sum().backward()
        reference.zero_grad()
        for peer in range(world_size):
            reference.uses_other = peer in users
            loss = reference(words_of(peer, step)).square().sum() / world_size
            loss.backward()
        for (name, ours), theirs in zip(
            model.module.named_parameters(), reference.parameters(), strict=True
        ):
            assert (ours.grad is None) == (theirs.grad is None), (name, step)
            if ours.grad is not None and theirs.grad is not None:
                a, b = ours.grad.to_dense(), theirs.grad.to_dense()
                tolerance = 1e-2 if hook == "bf16" and not ours.grad.is_sparse else 1e-5
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("hook", [None, "allreduce", "bf16", "powersgd"])
def test_with_unused_parameters_and_a_dense_hook(hook: str | None) -> None:
    """Torch cannot do this (#80496). Sparse buckets are averaged as rows."""
    run_ranks(unused_here_and_there, 2, hook)


def tied(rank: int, world_size: int) -> None:
    """A weight that is also used outside of the embedding has a dense gradient on some ranks."""
    embedding = nn.Embedding(6, 3, sparse=True)
    nn.init.ones_(embedding.weight)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = embedding

        def forward(self, words: torch.Tensor, dense: bool) -> torch.Tensor:
            x = self.embedding(words).sum()
            return x + 2 * self.embedding.weight.sum() if dense else x

    model = DistributedDataParallel(Tied())
    model(torch.tensor([rank]), dense=rank == 1).backward()
    expected = torch.full((6, 3), 1.0)
    expected[:2] += 0.5
    assert torch.equal(embedding.weight.grad.to_dense(), expected)


def test_a_dense_gradient_of_a_sparse_embedding() -> None:
    run_ranks(tied, 2)


def stats(rank: int, world_size: int) -> float | None:
    model = DistributedDataParallel(Words(bag=False))
    handle = commhooks.register(model, "allreduce")
    model(words_of(0, 0)).sum().backward()
    return handle.stats().total.wire_bytes


def test_wire_bytes_count_rows_only() -> None:
    sent = run_ranks(stats, 2)
    rows = len(words_of(0, 0).unique()) + len((words_of(0, 0)[:, 0] % 5).unique())
    head = (4 * 2 + 2) * 4
    assert sent == [rows * (8 + 4 * 4) + head] * 2


class Sneaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(words, self.weight, sparse=True).sum()


def unexpected(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Sneaky())
    with pytest.raises(RuntimeError, match=r"Parameter weight .* expected a dense .* Sparse"):
        model(torch.tensor([1])).backward()


def test_an_unexpected_sparse_gradient_raises() -> None:
    run_ranks(unexpected, 2)
