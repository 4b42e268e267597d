"""The matrix that a gradient is."""

from torch import Tensor

__all__ = ["matrix_shape"]


def matrix_shape(gradient: Tensor) -> tuple[int, int] | None:
    """(n, m) of the matrix that a gradient's memory is; None where there is none.

    n is the dimension with the largest stride: the memory of a dense tensor is then n rows of
    numel/n elements one after the other, whatever its layout. So a convolution's weight is (output
    channels, the rest) both row-major and channels_last, and is never copied into another order.
    Dimensions of size 1 have meaningless strides and do not count.
    """
    strides = zip(gradient.stride(), gradient.shape, strict=True)
    dims = [(stride, size) for stride, size in strides if size > 1]
    if len(dims) < 2 or gradient.numel() == 0:
        return None
    rows = max(dims)[1]
    return rows, gradient.numel() // rows
