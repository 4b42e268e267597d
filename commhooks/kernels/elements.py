"""What torch's dtypes are called in kernels."""

import torch

__all__ = ["ELEMENTS", "TYPES", "computed_in"]

TYPES = {torch.float32: "float", torch.float64: "double"}
"""In which kernels compute."""

ELEMENTS = TYPES | {
    torch.float16: "commhooks::kernels::Half",
    torch.bfloat16: "commhooks::kernels::BFloat16",
}
"""Of gradients, and on the wire; see element.h."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Which of TYPES an element is widened to."""
    return torch.promote_types(dtype, torch.float32)
