"""Checks of arguments, with the errors of the compiled functions."""

from torch import Tensor
from torch import dtype as Dtype  # noqa: N812

__all__ = ["require", "require_flat"]


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
