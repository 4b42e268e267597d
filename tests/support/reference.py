"""The algorithms of hooks in plain torch, one matrix and one loop at a time, as in the papers.

These are references for tests. They take the gradients of all ranks at once, and are slow.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def powersgd_two_sided(
    gradients: Sequence[Tensor], errors: Sequence[Tensor], Q: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Run one step of Algorithms 1 and 2 of https://arxiv.org/abs/1905.13727.

    Args:
        gradients: of every rank, (n, m).
        errors: of every rank, (n, m), from the previous step.
        Q: (m, r), the factor from the previous step.

    Returns:
        The average that all ranks get, the new errors of every rank, and the new factor.
    """
    M = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
    P = _gram_schmidt(_mean([M_i @ Q for M_i in M]))
    Q_i = [M_i.T @ P for M_i in M]
    Q = _mean(Q_i)
    return P @ Q.T, [M_i - P @ own.T for M_i, own in zip(M, Q_i, strict=True)], Q


def powersgd_one_sided(
    gradients: Sequence[Tensor], errors: Sequence[Tensor], factor: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Run one step of https://github.com/epfml/powersgd, from the right factor to the left one.

    Transpose all matrices for every second step, which goes from the left factor to the right one.

    Arguments and results are those of :func:`powersgd_two_sided`, except that the previous
    ``factor`` is (m, r), and the new one is (n, r).
    """
    M = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
    Q = _gram_schmidt(factor)
    P_i = [M_i @ Q for M_i in M]
    P = _mean(P_i)
    return P @ Q.T, [M_i - own @ Q.T for M_i, own in zip(M, P_i, strict=True)], P


def quantized_two_shot(
    gradients: Sequence[Tensor],
    errors: Sequence[Tensor],
    average_error: Tensor,
    quantize: Callable[[Tensor], Tensor],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Run one step of DoubleSqueeze (algorithm 1 of https://arxiv.org/abs/1905.05957).

    Args:
        gradients: of every rank, (blocks, block_size).
        errors: of every rank, (blocks, block_size), from the previous step.
        average_error: (blocks, block_size), from the previous step.
        quantize: rounds each block, as the hook's codec does.

    Returns:
        The average that all ranks get, the new errors of every rank, and the new error of the
        average.
    """
    x = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
    sent = [quantize(x_i) for x_i in x]
    y = _mean(sent) + average_error
    result = quantize(y)
    return result, [x_i - own for x_i, own in zip(x, sent, strict=True)], y - result


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def _gram_schmidt(A: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of A, which must be linearly independent."""
    columns: list[Tensor] = []
    for column in A.T:
        for earlier in columns:
            column = column - (earlier @ column) * earlier
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)
