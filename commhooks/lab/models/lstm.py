"""The LSTM language model of papers on gradient compression, 28 949 319 parameters.

It has three layers of width 650 and the 28869 words of WikiText-2. The decoder shares its weight
with the embedding: Vogels et al., PowerSGD, appendix; https://arxiv.org/abs/1905.13727.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["LSTMLanguageModel"]

_VOCABULARY, _WIDTH, _LAYERS = 28869, 650, 3


class LSTMLanguageModel(nn.Module):
    """Maps words and targets, int64 (time, batch), to the mean cross-entropy.

    There is no dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(_VOCABULARY, _WIDTH)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.rnn = nn.LSTM(_WIDTH, _WIDTH, _LAYERS)
        self.decoder = nn.Linear(_WIDTH, _VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.encoder(words))
        return cross_entropy(self.decoder(hidden).flatten(0, 1), targets.flatten())

    @staticmethod
    def example_input() -> tuple[Tensor, Tensor]:
        """Return four texts of 30 words and their targets."""
        words = torch.randint(_VOCABULARY, (31, 4))
        return words[:-1], words[1:]
