"""Select elements of a flat gradient, and add selected elements back in their places.

Gradients are flat, float32 or float64; indices are int32 and ascending. Infinities and NaN count as
larger than all numbers, so they are always selected. The CPU runs compiled loops and GPUs run
kernels; both give the same bits.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks import native
from commhooks.codecs.block import check_numbers
from commhooks.errors import CommHookError
from commhooks.kernels import backend_of, selection
from commhooks.kernels import sparse as kernels


def kept_elements(density: float, numel: int) -> int:
    """Return ``density * numel`` as an integer, at least 1 unless there are no elements."""
    return min(numel, max(1, round(density * numel)))


def select_largest(gradient: Tensor, error: Tensor | None, count: int) -> Tensor:
    """Add ``error`` to ``gradient``; return the indices of the ``count`` largest magnitudes.

    Of equal magnitudes the first are selected. One pass over the memory. Does not wait for the
    device.
    """
    _check(gradient, error)
    if not 0 <= count <= gradient.numel():
        raise CommHookError(f"expected to select 0 to {gradient.numel()} elements, found {count}")
    if backend_of(gradient) is None:
        return native.select_largest(gradient, error, count)
    return selection.select_largest(gradient, error, count)


def select_largest_of_chunks(
    gradient: Tensor, error: Tensor | None, chunk: int, count: int
) -> Tensor:
    """Select as :func:`select_largest` does, but ``count`` of each ``chunk`` consecutive elements.

    If the last chunk has fewer elements than ``count``, all of them are selected.
    """
    _check(gradient, error)
    if not 1 <= count <= chunk:
        raise CommHookError(f"expected to select 1 to {chunk} elements of each, found {count}")
    if backend_of(gradient) is None:
        return native.select_largest_of_chunks(gradient, error, chunk, count)
    if error is not None:
        gradient.add_(error)
    padding = -gradient.numel() % chunk
    chunks = pad(gradient.abs(), (0, padding)).view(-1, chunk)
    found = chunks.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    found += torch.arange(0, chunks.numel(), chunk, device=found.device)[:, None]
    return found.view(-1)[: found.numel() - max(0, count + padding - chunk)].int()


def select_above(gradient: Tensor, error: Tensor | None, threshold: float) -> Tensor:
    """Add ``error`` to ``gradient``; return the indices of magnitudes of at least ``threshold``.

    One pass over the memory. Waits for the device, to learn how many indices there are.
    """
    _check(gradient, error)
    if not threshold > 0:
        raise CommHookError(f"expected a threshold above 0, found {threshold}")
    if backend_of(gradient) is None:
        return native.select_above(gradient, error, threshold)
    return selection.select_above(gradient, error, threshold)


def add_and_check(gradient: Tensor, error: Tensor | None) -> Tensor:
    """Add ``error`` to ``gradient``; return (1,): zero if all sums are finite, else NaN."""
    if backend_of(gradient) is not None:
        _check(gradient, error)
        return selection.add_and_check(gradient, error)
    bad = select_above(gradient, error, math.inf)
    return gradient.new_full((1,), math.nan if bad.numel() > 0 else 0.0)


def draw_indices(numel: int, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Draw ``count`` different indices below ``numel``, each index with the same probability.

    They are on the device of ``like`` and the same on all devices. The circle of all indices is
    divided into ``count`` runs, as equal as possible, and one index is drawn from each: see
    RandomIndices in kernels/codecs/sparse.h.
    """
    indices = like.new_empty(count, dtype=torch.int32)
    if count == 0:
        return indices
    seed, rotation = (
        int(torch.randint(limit, (), generator=generator)) for limit in (2**63 - 1, numel)
    )
    if backend_of(indices) is None:
        native.draw_indices(seed, rotation, numel, indices)
    else:
        kernels.draw_indices(seed, rotation, numel, indices)
    return indices


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Add ``values`` to ``out[indices]``. Values and ``out`` are of one dtype."""
    check_numbers(values)
    check_numbers(out)
    if values.dtype != out.dtype or indices.dtype != torch.int32:
        raise CommHookError(
            f"expected values in {out.dtype} at indices in torch.int32, found {values.dtype} and "
            f"{indices.dtype}"
        )
    if values.shape != indices.shape:
        raise CommHookError(
            f"expected as many values as indices, found {values.numel()} and {indices.numel()}"
        )
    on_device = native if backend_of(out) is None else kernels
    on_device.scatter_add(values, indices, out)


def _check(gradient: Tensor, error: Tensor | None) -> None:
    check_numbers(gradient, error)
    if gradient.numel() >= 2**31:
        raise CommHookError(
            f"expected fewer than 2^31 elements in a bucket, found {gradient.numel()}"
        )
