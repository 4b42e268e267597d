"""The values of a sparse message in few bits.

::

    message      | indices | values, float32 or float64 |
    compact      | indices | the codec's message: a scale per block, then the codes |

The indices take a multiple of 8 bytes, so both are aligned.
"""

import torch
from torch import Tensor

from commhooks.codecs.block import BlockCodec
from commhooks.codecs.index_code import IndexCode

__all__ = ["compact_bytes", "expand", "quantize_values"]


def compact_bytes(code: IndexCode, codec: BlockCodec) -> int:
    """Return the size of a compact message."""
    return code.nbytes + codec.encoded_bytes(code.count)


def quantize_values(
    message: Tensor, code: IndexCode, codec: BlockCodec, dtype: torch.dtype
) -> Tensor:
    """Return the compact form of ``message``, whose values are of ``dtype``."""
    compact = message.new_empty(compact_bytes(code, codec))
    compact[: code.nbytes] = message[: code.nbytes]
    codec.encode(message[code.nbytes :].view(dtype), compact[code.nbytes :].view(1, -1), code.count)
    return compact


def expand(messages: Tensor, code: IndexCode, codec: BlockCodec, dtype: torch.dtype) -> Tensor:
    """Return ``messages``, which are compact, (ranks, bytes), with values of ``dtype``.

    If a value is not finite, all values of its message become NaN.
    """
    expanded = messages.new_empty((len(messages), code.nbytes + code.count * dtype.itemsize))
    expanded[:, : code.nbytes] = messages[:, : code.nbytes]
    for compact, message in zip(messages, expanded, strict=True):
        codec.assemble(
            compact[code.nbytes :].view(1, -1), message[code.nbytes :].view(dtype), code.count
        )
    return expanded
