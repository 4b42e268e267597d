"""fp4: 4-bit floating point, with a scale per group or block, and error feedback.

::

    def quantize(x):                                       # x: (blocks, 1024)
        tensor_scale = x.abs().amax(1)[:, None, None] / (6 * 448)
        x = x.unflatten(1, (-1, 16))                       # groups
        scale = x.abs().amax(2, keepdim=True) / 6 / tensor_scale
        scale = tensor_scale * scale.to(torch.float8_e4m3fn).float()
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        middles = (levels[1:] + levels[:-1]) / 2           # ties to the even code, not shown
        size = levels[torch.bucketize((x / scale).abs(), middles)]
        return (scale * size * x.sign()).flatten(1)        # sent: the scales and 4 bits

    x = gradient + error
    error = x - quantize(x)
    y = mean_over_ranks(quantize(x)) + average_error       # all-to-all: rank j averages part j
    average_error = y - quantize(y)
    return quantize(y)                                     # all-gather

This is NVFP4, with a tensor scale for each 1024 numbers instead of one for all, so that a bucket is
read once. MXFP4 has groups of 32, and powers of two as scales. NVFP4 costs a quarter of a bit more
per number. E3M0 has no groups, only a scale for each 1024 numbers, and the levels 0, 0.25, 0.5, 1,
2, 4, 8, 16.

Formats: OCP Microscaling Formats (MX) Specification 1.0; NVFP4 as in NVIDIA's Transformer Engine;
E3M0 as in Douillard et al.: Streaming DiLoCo, https://arxiv.org/abs/2501.18512.
"""

from dataclasses import dataclass
from typing import Literal

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.fp4 import Fp4Codec
from commhooks.hook.registry import register_hook

__all__ = ["Fp4"]


@register_hook("fp4")
@dataclass
class Fp4(Quantized):
    """Average in 4-bit floating point: 1/7 of the bytes of float32.

    Biased in each step but exact over steps, because errors are sent later.
    """

    format: Literal["nvfp4", "mxfp4", "e3m0"] = "nvfp4"
    """nvfp4 has a scale with 3 bits of mantissa for each 16 numbers, mxfp4 a power of two for each
    32, and e3m0 one scale for each 1024: fewer bytes, larger errors. e3m0 has powers of two only.
    """
    error_feedback: bool = True
    """Add the error of a step to the next gradient. Without it, the result is biased."""

    wire = "1/2 byte per element and scales of groups, in an all-to-all and an all-gather"

    @property
    def uses_error_feedback(self) -> bool:
        return self.error_feedback

    def make_codec(self) -> BlockCodec:
        return Fp4Codec(self.format)
