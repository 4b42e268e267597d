"""fp8 and fp4: floating point of 8 or 4 bits, with scales, and error feedback.

Unlike with integers, the error of a number is proportional to the number: in fp8 at most 1/16 of it
in e4m3, 1/8 in e5m2.

Formats: Micikevicius et al.: FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433; OCP
Microscaling Formats (MX) Specification 1.0; NVFP4 as in NVIDIA's Transformer Engine; E3M0 as in
Douillard et al.: Streaming DiLoCo, https://arxiv.org/abs/2501.18512.
"""

from dataclasses import dataclass, field
from typing import Literal

from commhooks.algorithms.quantized.base import QuantizedWithFeedback
from commhooks.codecs.formats import E3M0, E4M3, E5M2, MXFP4, NVFP4, Format
from commhooks.hook.registry import register_hook


@register_hook("fp8")
@dataclass
class Fp8(QuantizedWithFeedback):
    """Average in 8-bit floating point with a scale per block: a quarter of the bytes of float32.

    ::

        def quantize(x):                                       # x: (blocks, block_size)
            scale = x.abs().amax(1, keepdim=True) / 448        # the largest number; e5m2: 57344
            return scale * (x / scale).to(torch.float8_e4m3fn).float()  # sent: scales and 8 bits
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    """e4m3 has 3 bits of mantissa, e5m2 has 2 and a wider range."""

    wire = "1 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/2209.05433"

    def number_format(self) -> Format:
        return {"e4m3": E4M3, "e5m2": E5M2}[self.format]


@register_hook("fp4")
@dataclass
class Fp4(QuantizedWithFeedback):
    """Average in 4-bit floating point: 1/7 of the bytes of float32.

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

    This is NVFP4, with a tensor scale for each 1024 numbers instead of one for all, so that a
    bucket is read once. MXFP4 has groups of 32, and powers of two as scales. NVFP4 costs a quarter
    of a bit more per number. E3M0 has no groups, only a scale for each 1024 numbers, and the levels
    0, 0.25, 0.5, 1, 2, 4, 8, 16.
    """

    block_size: int = field(default=1024, init=False, repr=False)
    format: Literal["nvfp4", "mxfp4", "e3m0"] = "nvfp4"
    """nvfp4 has a scale with 3 bits of mantissa for each 16 numbers, mxfp4 a power of two for each
    32, and e3m0 one scale for each 1024: fewer bytes, larger errors. e3m0 has powers of two only.
    """

    wire = "1/2 byte per element and scales of groups, in an all-to-all and an all-gather"

    def number_format(self) -> Format:
        return {"nvfp4": NVFP4, "mxfp4": MXFP4, "e3m0": E3M0}[self.format]
