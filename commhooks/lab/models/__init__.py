"""Models to measure with, by name. None needs a download.

The models have the parameters and the arithmetic of the published ones. Weights and inputs are
random, because only time and bytes are measured.
"""

from commhooks.lab.models.gpt2 import GPT2Small
from commhooks.lab.models.loading import (
    ModelError,
    built_in_models,
    load_callable,
    load_model,
    name_of,
)
from commhooks.lab.models.lstm import LSTMLanguageModel
from commhooks.lab.models.resnet import ResNet50
from commhooks.lab.models.transformer import Transformer
from commhooks.lab.models.workload import Workload

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
