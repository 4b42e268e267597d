"""A model under test: made alike on every rank, given the same input in every step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from commhooks.lab.models.loading import ModelError, load_callable, load_model

__all__ = ["Subject"]

_SEED = 20190530


@dataclass(frozen=True)
class Subject:
    """Where model and input come from.

    Args:
        model: as of :func:`commhooks.lab.models.load_model`.
        input: ``package.module:factory`` of a batch: a tensor, a tuple of positional arguments or a
            dict of named ones. None: the model's own ``example_input()``.
    """

    model: str
    input: str | None = None

    def make_module(self) -> nn.Module:
        """The same on every rank and every time, if the factory draws from torch's generator."""
        torch.manual_seed(_SEED)
        return load_model(self.model)

    def make_input(self, module: nn.Module, rank: int) -> Any:
        """The batch of a rank. Raises ModelError."""
        torch.manual_seed(_SEED + 1 + rank)
        if self.input is not None:
            return load_callable(self.input)()
        example_input = getattr(module, "example_input", None)
        if example_input is None:
            raise ModelError(
                f"model {self.model!r}: {type(module).__name__} has no example_input(); pass "
                "--input package.module:factory, a function that returns a batch"
            )
        return example_input()

    def loss(self, model: nn.Module, batch: Any, rank: int) -> Tensor:
        """Of one forward pass; dropout falls alike for all contenders."""
        torch.manual_seed(_SEED + 1 + rank)
        if isinstance(batch, tuple):
            return _loss_of(model(*batch))
        return _loss_of(model(**batch) if isinstance(batch, dict) else model(batch))


def _loss_of(output: Any) -> Tensor:
    """The output, if it is a loss or has one; else its mean square, which is as good for timing."""
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    output = getattr(output, "loss", output)
    while isinstance(output, list | tuple) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise ModelError(
            "expected a model that returns a tensor, a tuple that begins with one, or something "
            f"with a loss; found {type(output).__name__}"
        )
    return output if output.dim() == 0 else output.square().mean()
