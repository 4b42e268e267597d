"""A model to measure with, its input and its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from commhooks.lab.models.loading import ModelError, load_callable, load_model, name_of

__all__ = ["Workload"]

_SEED = 20190530


@dataclass(frozen=True)
class Workload:
    """A model and its input, by name, so that every process makes the same ones.

    Args:
        model: the name of a model, as for :func:`commhooks.lab.models.load_model`, or a function or
            class of a module, whose name is kept.
        input: ``package.module:factory`` of a batch, or the factory. A batch is a tensor, a tuple
            of positional arguments or a dict of keyword arguments. None: the model's own
            ``example_input()``.
        wrapper: names and values of options of the wrappers, such as ``("bucket_cap_mb", 8)``.
        set_to_none: how gradients are cleared between steps, as by ``zero_grad()``.
    """

    model: str | Callable[..., nn.Module]
    input: str | Callable[..., Any] | None = None
    wrapper: tuple[tuple[str, Any], ...] = ()
    set_to_none: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", name_of(self.model))
        object.__setattr__(self, "wrapper", tuple(map(tuple, self.wrapper)))  # lists in JSON
        if self.input is not None:
            object.__setattr__(self, "input", name_of(self.input))

    def make_module(self) -> nn.Module:
        """Make the model.

        All ranks get the same weights if the factory draws them from torch's default generator.
        """
        torch.manual_seed(_SEED)
        return load_model(str(self.model))

    def make_input(self, module: nn.Module, rank: int) -> Any:
        """Make the batch of a rank, which is the same in every step. Raises ModelError."""
        torch.manual_seed(_SEED + 1 + rank)
        if self.input is not None:
            return load_callable(str(self.input))()
        example_input = getattr(module, "example_input", None)
        if example_input is None:
            raise ModelError(
                f"model {self.model!r}: {type(module).__name__} has no example_input(); pass "
                "--input package.module:factory, a function that returns a batch"
            )
        return example_input()

    def loss(self, model: nn.Module, batch: Any, rank: int) -> Tensor:
        """Run one forward pass. Dropout draws the same numbers in every step."""
        torch.manual_seed(_SEED + 1 + rank)
        if isinstance(batch, tuple):
            return _loss_of(model(*batch))
        return _loss_of(model(**batch) if isinstance(batch, dict) else model(batch))


def _loss_of(output: Any) -> Tensor:
    """Return the loss in ``output``, or its mean square, which serves as well for timing."""
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    output = getattr(output, "loss", output)
    while isinstance(output, list | tuple) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise ModelError(
            "expected a model that returns a tensor, a tuple whose first element is a tensor, or "
            f"an object with a loss; found {type(output).__name__}"
        )
    return output if output.dim() == 0 else output.square().mean()
