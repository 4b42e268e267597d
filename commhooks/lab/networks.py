"""Networks with the parameters and the arithmetic of published ones.

Weights and inputs are random, because only time and bytes are measured.

Letters: B batch, T time, C width, H heads.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

_GPT_LAYERS, _GPT_WIDTH, _GPT_HEADS, _GPT_CONTEXT, _GPT_VOCABULARY = 12, 768, 12, 1024, 50257
_LSTM_VOCABULARY, _LSTM_WIDTH, _LSTM_LAYERS = 28869, 650, 3
_RESNET_BLOCKS = (3, 4, 6, 3)  # per stage; the width is 64, and doubles from stage to stage
_EXPANSION = 4
_TRANSFORMER_WIDTH = 512


class _Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as in the published weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class _GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = _GPT_WIDTH
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": _Conv1D(width, 3 * width), "c_proj": _Conv1D(width, width)}
        )
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {"c_fc": _Conv1D(width, 4 * width), "c_proj": _Conv1D(4 * width, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        attn, mlp = self.attn, self.mlp
        heads = attn["c_attn"](self.ln_1(x)).unflatten(-1, (3, _GPT_HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # from (B, T, 3, H, C / H) to (3, B, H, T, C / H)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attn["c_proj"](mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + mlp["c_proj"](gelu(mlp["c_fc"](self.ln_2(x)), approximate="tanh"))
        return y


class GPT2Small(nn.Module):
    """GPT-2 small (Radford et al. 2019), 124 439 808 parameters in 148 tensors, without dropout.

    Maps tokens and targets, int64 (B, T), to the mean cross-entropy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(_GPT_VOCABULARY, _GPT_WIDTH)
        self.wpe = nn.Embedding(_GPT_CONTEXT, _GPT_WIDTH)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)
        self.h = nn.ModuleList(_GPTBlock() for _ in range(_GPT_LAYERS))
        self.ln_f = nn.LayerNorm(_GPT_WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = linear(self.ln_f(x), self.wte.weight)
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    @staticmethod
    def example_input() -> tuple[Tensor, Tensor]:
        """Return one sequence of 128 tokens and its targets; a CPU takes seconds for it."""
        window = torch.randint(_GPT_VOCABULARY, (1, 129))
        return window[:, :-1], window[:, 1:]


class LSTMLanguageModel(nn.Module):
    """The LSTM language model of papers on gradient compression, 28 949 319 parameters, no dropout.

    It has three layers of width 650 and the 28869 words of WikiText-2. The decoder shares its
    weight with the embedding: Vogels et al., PowerSGD, appendix; https://arxiv.org/abs/1905.13727.

    Maps words and targets, int64 (T, B), to the mean cross-entropy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(_LSTM_VOCABULARY, _LSTM_WIDTH)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.rnn = nn.LSTM(_LSTM_WIDTH, _LSTM_WIDTH, _LSTM_LAYERS)
        self.decoder = nn.Linear(_LSTM_WIDTH, _LSTM_VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.encoder(words))
        return cross_entropy(self.decoder(hidden).flatten(0, 1), targets.flatten())

    @staticmethod
    def example_input() -> tuple[Tensor, Tensor]:
        """Return four texts of 30 words and their targets."""
        words = torch.randint(_LSTM_VOCABULARY, (31, 4))
        return words[:-1], words[1:]


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
    """ResNet-50 (He et al. 2016, https://arxiv.org/abs/1512.03385), 25 557 032 parameters.

    The stride of a block is in its 3x3 convolution, as in the common version "v1.5".

    Maps images (B, 3, 224, 224) and labels (B,) to the mean cross-entropy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for index, blocks in enumerate(_RESNET_BLOCKS):
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
        for index in range(len(_RESNET_BLOCKS)):
            x = self.get_submodule(f"layer{index + 1}")(x)
        return cross_entropy(self.fc(x.mean((2, 3))), labels)

    @staticmethod
    def example_input() -> tuple[Tensor, Tensor]:
        """Return two images of the size of ImageNet crops, and their labels."""
        return torch.randn(2, 3, 224, 224), torch.randint(1000, (2,))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_TRANSFORMER_WIDTH)
        self.qkv = nn.Linear(_TRANSFORMER_WIDTH, 3 * _TRANSFORMER_WIDTH)
        self.out = nn.Linear(_TRANSFORMER_WIDTH, _TRANSFORMER_WIDTH)
        self.up = nn.Linear(_TRANSFORMER_WIDTH, 4 * _TRANSFORMER_WIDTH)
        self.down = nn.Linear(4 * _TRANSFORMER_WIDTH, _TRANSFORMER_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(q * k + v)
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Transformer(nn.Module):
    """151 MB of parameters in the shapes of a transformer, with very little arithmetic.

    Backward does little besides writing gradients, which is the hardest case for communication.
    There are 12 layers of width 512. Attention itself is left out, because it has no parameters.
    """

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, (B, 512), to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x

    @staticmethod
    def example_input() -> Tensor:
        """Return eight vectors."""
        return torch.randn(8, _TRANSFORMER_WIDTH)
