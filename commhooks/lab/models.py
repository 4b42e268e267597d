"""Models to measure with, their inputs and their losses, all by name. None needs a download.

A name is that of a built-in model such as ``gpt2-small``, or of a factory, as in
``my_package.models:make``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from commhooks.cluster import CPU, Device
from commhooks.errors import CommHookError, did_you_mean
from commhooks.hook.references import load_reference, reference_to
from commhooks.lab.networks import GPT2Small, LSTMLanguageModel, ResNet50, Transformer

_SEED = 20190530
_BUILT_IN: dict[str, Callable[[], nn.Module]] = {
    "gpt2-small": GPT2Small,
    "lstm": LSTMLanguageModel,
    "resnet50": ResNet50,
    "transformer-151mb": Transformer,
}


class ModelError(CommHookError, ValueError):
    """The model does not exist or cannot be trained."""


@dataclass(frozen=True)
class Workload:
    """A model and its input, by name, so that every process makes the same ones.

    Args:
        model: the name of a model, as for :func:`load_model`, or a function or
            class of a module, whose name is kept.
        input: ``package.module:factory`` of a batch, or the factory. A batch is a tensor, a tuple
            of positional arguments or a mapping of keyword arguments. None: the model's own
            ``example_input()``.
        wrapper: names and values of options of the wrappers, such as ``("bucket_cap_mb", 8)``.
        set_to_none: how gradients are cleared between steps, as by ``zero_grad()``.
        device: what ranks compute on. Weights and inputs are drawn on the CPU, as on every device.
    """

    model: str | Callable[..., nn.Module]
    input: str | Callable[..., Any] | None = None
    wrapper: tuple[tuple[str, Any], ...] = ()
    set_to_none: bool = True
    device: Device = CPU

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
        module: nn.Module = self.device.put(load_model(str(self.model)))
        return module

    def make_input(self, module: nn.Module, rank: int) -> Any:
        """Make the batch of a rank, which is the same in every step. Raises ModelError."""
        torch.manual_seed(_SEED + 1 + rank)
        if self.input is not None:
            return self.device.put(
                _made_by(load_callable(str(self.input)), f"input {self.input!r}")
            )
        example_input = getattr(module, "example_input", None)
        if example_input is None:
            raise ModelError(
                f"model {self.model!r}: {type(module).__name__} has no example_input(); pass "
                "--input package.module:factory, a function that returns a batch"
            )
        return self.device.put(_made_by(example_input, f"example_input() of {self.model!r}"))

    def loss(self, model: nn.Module, batch: Any, rank: int) -> Tensor:
        """Run one forward pass. Dropout draws the same numbers in every step."""
        torch.manual_seed(_SEED + 1 + rank)
        if isinstance(batch, tuple):
            return _loss_of(model(*batch))
        return _loss_of(model(**batch) if isinstance(batch, Mapping) else model(batch))


def _loss_of(output: Any) -> Tensor:
    """Return the loss in ``output``, or its mean square, which serves as well for timing.

    Models of Transformers have no loss without labels.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    output = output if loss is None else loss
    while isinstance(output, Mapping | list | tuple) and output:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(output, Tensor):
        raise ModelError(
            "expected a model that returns a tensor, a tuple or dict whose first element is a "
            f"tensor, or an object with a loss; found {type(output).__name__}"
        )
    return output if output.dim() == 0 else output.square().mean()


def _made_by(factory: Callable[[], Any], what: str) -> Any:
    try:
        return factory()
    except Exception as error:
        raise ModelError(f"{what}: its factory raised {type(error).__name__}: {error}") from error


def built_in_models() -> list[str]:
    return sorted(_BUILT_IN)


def load_model(name: str) -> nn.Module:
    """Make a built-in model, or call the factory ``package.module:factory``, ``file.py:factory``.

    Inside ``with torch.device("meta")`` built-in models take no memory.

    Raises ModelError if the name is unknown; if the factory cannot be imported, is not callable or
    raises; or if it does not return a module with parameters that need gradients.
    """
    factory = load_callable(name) if ":" in name else _BUILT_IN.get(name)
    if factory is None:
        raise ModelError(
            f"no model is named {name!r}"
            + (did_you_mean(name, _BUILT_IN) or ".")
            + f" Built in: {', '.join(built_in_models())}. "
            "A model of your own: package.module:factory or train.py:factory."
        )
    model = _made_by(factory, f"model {name!r}")
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model {name!r}: expected its factory to return a torch.nn.Module, found "
            f"{type(model).__name__}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"model {name!r}: {type(model).__name__} has no parameters that need gradients, so "
            "there is nothing to average"
        )
    return model


def load_callable(path: str) -> Callable[..., Any]:
    """Import the callable ``package.module:name`` or ``file.py:name``. Raises ModelError."""
    try:
        found = load_reference(path)
    except CommHookError as error:
        raise ModelError(str(error)) from error
    if not callable(found):
        raise ModelError(f"{path!r}: expected a callable, found {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def name_of(found: str | Callable[..., Any]) -> str:
    """Return the name by which rank processes import a callable. Raises ModelError."""
    if isinstance(found, str):
        return found
    try:
        return reference_to(found)
    except CommHookError as error:
        raise ModelError(str(error)) from error
