"""Checks of arguments, with the errors of the compiled functions, and the warning about speed."""

import functools
import warnings

from torch import Tensor
from torch import dtype as Dtype  # noqa: N812


def require(holds: bool, message: str) -> None:
    """Raise RuntimeError, as TORCH_CHECK does, unless the requirement ``holds``."""
    if not holds:
        raise RuntimeError(message)


def require_flat(name: str, tensor: Tensor, dtype: Dtype) -> None:
    """Raise RuntimeError unless the tensor is flat and contiguous, on the CPU, in ``dtype``."""
    require(
        tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and tensor.dim() == 1
        and tensor.is_contiguous(),
        f"Expected {name} to be flat {dtype} on the CPU, found shape {list(tensor.shape)} in "
        f"{tensor.dtype} on {tensor.device}.",
    )


@functools.cache
def warn_once() -> None:
    """Say what the compiled extension would gain, when CPU tensors are encoded or selected."""
    warnings.warn(
        "commhooks is installed without its compiled extensions: on CPU tensors, hooks compute the "
        "same bits in NumPy, where quantizing takes about 20 times as long, decoding 5 times and "
        "selecting the largest elements 3 times (GPUs run the same kernels). To compile the "
        "extensions, you need a C++20 compiler: `pip install --no-build-isolation "
        "--force-reinstall --no-deps .` in the sources",
        stacklevel=3,
    )
