"""What torch's dtypes are called in kernels; what is computed in is `at_least_float32`."""

import torch

__all__ = ["ELEMENTS", "TYPES"]

TYPES = {torch.float32: "float", torch.float64: "double"}
"""In which kernels compute."""

ELEMENTS = TYPES | {
    torch.float16: "commhooks::kernels::Half",
    torch.bfloat16: "commhooks::kernels::BFloat16",
}
"""Of gradients, and on the wire; see element.h."""
