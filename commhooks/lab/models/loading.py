"""Loads models by name or by factory: ``gpt2-small``, ``my_package.models:make``."""

import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from commhooks.errors import CommHookError
from commhooks.hook.references import load_reference, reference_to
from commhooks.lab.models.gpt2 import GPT2Small
from commhooks.lab.models.lstm import LSTMLanguageModel
from commhooks.lab.models.resnet import ResNet50
from commhooks.lab.models.transformer import Transformer

__all__ = ["ModelError", "built_in_models", "load_callable", "load_model", "name_of"]

_BUILT_IN: dict[str, Callable[[], nn.Module]] = {
    "gpt2-small": GPT2Small,
    "lstm": LSTMLanguageModel,
    "resnet50": ResNet50,
    "transformer-151mb": Transformer,
}


class ModelError(CommHookError, ValueError):
    """The model does not exist or cannot be trained."""


def built_in_models() -> list[str]:
    """Return the names of the built-in models."""
    return sorted(_BUILT_IN)


def load_model(name: str) -> nn.Module:
    """Make a built-in model, or call the factory ``package.module:factory``, ``file.py:factory``.

    Inside ``with torch.device("meta")`` built-in models take no memory.

    Raises ModelError if the name is unknown; if the factory cannot be imported, is not callable or
    raises; or if it does not return a module with parameters that need gradients.
    """
    factory = load_callable(name) if ":" in name else _BUILT_IN.get(name)
    if factory is None:
        near = difflib.get_close_matches(name, _BUILT_IN, n=1)
        raise ModelError(
            f"no model is named {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Built in: {', '.join(built_in_models())}. "
            "A model of your own: package.module:factory or train.py:factory."
        )
    try:
        model = factory()
    except Exception as error:
        raise ModelError(f"model {name!r}: its factory raised {_text(error)}") from error
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


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
