"""Models to measure with, by name. None needs a download."""

from commhooks.lab.models.networks import GPT2Small, LSTMLanguageModel, ResNet50, Transformer
from commhooks.lab.models.workload import (
    ModelError,
    Workload,
    built_in_models,
    load_callable,
    load_model,
    name_of,
)

__all__ = [
    "GPT2Small",
    "LSTMLanguageModel",
    "ModelError",
    "ResNet50",
    "Transformer",
    "Workload",
    "built_in_models",
    "load_callable",
    "load_model",
    "name_of",
]
