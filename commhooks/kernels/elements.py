"""The names of torch's dtypes in kernels. Kernels compute in ``at_least_float32(dtype)``."""

import torch

__all__ = ["ELEMENTS", "TYPES"]

TYPES = {torch.float32: "float", torch.float64: "double"}
"""Types in which kernels compute."""

ELEMENTS = TYPES | {
    torch.float16: "commhooks::kernels::Half",
    torch.bfloat16: "commhooks::kernels::BFloat16",
}
"""Types of gradients and of values on the wire; see element.h."""
