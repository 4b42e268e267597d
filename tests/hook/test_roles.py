"""The roles of parameters: embeddings, tied ones included, and the output layer."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from commhooks.hook.roles import roles_of
from examples.gpt import GPT, GPTConfig


class Blocks(nn.Module):
    """Repeated blocks, and an embedding and a head if wanted."""

    def __init__(self, *, has_head: bool = True, is_tied: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(4, 9) if has_head else None  # before the blocks
        self.tokens = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        if is_tied and self.head is not None:
            self.head.weight = self.tokens.weight


class Named(Blocks):
    """A model that names its output layer, as those of Transformers do."""

    def __init__(self, *, has_output: bool = True) -> None:
        super().__init__()
        self.decoder = nn.ModuleDict({"out": nn.Linear(4, 9)})
        self.pooler = nn.Linear(4, 4)
        self.has_output = has_output

    def get_output_embeddings(self) -> nn.Module | None:
        return self.decoder["out"] if self.has_output else None


class Unable(nn.Linear):
    """Has a method of the same name for something else."""

    def get_output_embeddings(self, number: int) -> nn.Module:
        raise NotImplementedError


def of_blocks(role: str) -> dict[str, str]:
    return {"tokens.weight": "embedding", "head.weight": role, "head.bias": "output"}


EMBEDDINGS = {"token_embedding.weight": "embedding", "position_embedding.weight": "embedding"}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "the last of a sequence": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()),
        {"1.weight": "output", "1.bias": "output"},
    ),
    "nearest to the root": (
        lambda: nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2))),
        {"0.weight": "output"},
    ),
    "the model itself": (lambda: nn.Linear(2, 2, bias=False), {"weight": "output"}),
    "a head": (Blocks, of_blocks("output")),
    "a tied head": (lambda: Blocks(is_tied=True), of_blocks("embedding")),
    "only blocks": (lambda: Blocks(has_head=False), {"tokens.weight": "embedding"}),
    "tied without a module": (lambda: GPT(GPTConfig(layers=1)), EMBEDDINGS),
    "a bag": (lambda: nn.Sequential(nn.EmbeddingBag(3, 2)), {"0.weight": "embedding"}),
    "parametrized": (
        lambda: nn.Sequential(weight_norm(nn.Embedding(3, 2))),
        {f"0.parametrizations.weight.original{i}": "embedding" for i in (0, 1)},
    ),
    "named by the model": (
        lambda: nn.Sequential(Named()),
        {"0.tokens.weight": "embedding"}
        | {"0.decoder.out.weight": "output", "0.decoder.out.bias": "output"},
    ),
    "named, but there is none": (
        lambda: Named(has_output=False),
        {"tokens.weight": "embedding", "pooler.weight": "output", "pooler.bias": "output"},
    ),
    "another method": (lambda: Unable(2, 2, bias=False), {"weight": "output"}),
    "neither": (lambda: nn.Conv1d(1, 1, 1), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_roles(case: str) -> None:
    make, expected = CASES[case]
    with torch.device("meta"):
        assert roles_of(make()) == expected
