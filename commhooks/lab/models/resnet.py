"""ResNet-50 (He et al. 2016, https://arxiv.org/abs/1512.03385), 25 557 032 parameters.

The stride of a block is in its 3x3 convolution, as in the common version "v1.5".
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["ResNet50"]

_EXPANSION = 4
_BLOCKS = (
    3,
    4,
    6,
    3,
)  # per stage; the width is 64 in the first one and doubles from stage to stage


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        wide: Tensor = self.bn3(self.conv3(y)) + self.downsample(x)
        return wide.relu()


class ResNet50(nn.Module):
    """Maps images (batch, 3, 224, 224) and labels (batch,) to the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for index, blocks in enumerate(_BLOCKS):
            width = 64 << index
            stage = nn.Sequential()
            for block in range(blocks):
                stride = 2 if index > 0 and block == 0 else 1
                stage.append(_Bottleneck(inputs, width, stride))
                inputs = _EXPANSION * width
            self.add_module(f"layer{index + 1}", stage)
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(images)).relu())
        for index in range(len(_BLOCKS)):
            x = self.get_submodule(f"layer{index + 1}")(x)
        return cross_entropy(self.fc(x.mean((2, 3))), labels)

    @staticmethod
    def example_input() -> tuple[Tensor, Tensor]:
        """Return two images of the size of ImageNet crops, and their labels."""
        return torch.randn(2, 3, 224, 224), torch.randint(1000, (2,))
