"""A model of timm for ``commhooks compare``, as a user writes it in a module of their own."""

import timm
import torch
from torch import Tensor, nn


def model() -> nn.Module:
    net: nn.Module = timm.create_model("test_resnet", num_classes=4)
    return net


def images() -> Tensor:
    return torch.randn(4, 3, 32, 32)
