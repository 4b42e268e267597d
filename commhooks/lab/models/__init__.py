"""Models to measure with, by name; none needs a download.

The parameters have the names, shapes and numbers of the real ones, and the arithmetic is theirs.
Weights are random, and so is the input: what is measured is time and bytes.

Imports: errors.
"""

from commhooks.lab.models.gpt2 import GPT2Small
from commhooks.lab.models.loading import ModelError, built_in_models, load_callable, load_model
from commhooks.lab.models.lstm import LSTMLanguageModel
from commhooks.lab.models.resnet import ResNet50
from commhooks.lab.models.subject import Subject
from commhooks.lab.models.transformer import Transformer

__all__ = [
    "GPT2Small",
    "LSTMLanguageModel",
    "ModelError",
    "ResNet50",
    "Subject",
    "Transformer",
    "built_in_models",
    "load_callable",
    "load_model",
]
