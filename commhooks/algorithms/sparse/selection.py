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
from commhooks.kernels import kernel_backend_of, launch
from commhooks.kernels.launcher import THREADS, Argument, blocks_for, streaming_blocks
from commhooks.kernels.source import SELECTION, SPARSE, TYPES, kernel_name

_WORD = 32  # elements per word of marks, as the numbers below those of kernels/selection.cu
_CHUNK = THREADS * _WORD
_SAMPLING_THREADS = 1024
_SAMPLE_BYTES = 64 * _SAMPLING_THREADS
_DIGIT_BITS = 11
_STATE_BYTES = 4 * (1 << _DIGIT_BITS) + 56
_SELECTED = 4  # its position in the state, in words of 64 bits
_REFINING_BLOCKS = 1024


def elements_to_send(density: float, numel: int) -> int:
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
    if kernel_backend_of(gradient) is None:
        return native.select_largest(gradient, error, count)
    indices = gradient.new_empty(count, dtype=torch.int32)
    if count == 0:
        add_and_check(gradient, error)
        return indices
    selection = _Selection(gradient)
    selection.mark(error, count, sample_rank=_sample_rank(gradient, count), bound=1)
    selection.refine()
    selection.count()
    selection.list(indices)
    return indices


def select_largest_of_chunks(
    gradient: Tensor, error: Tensor | None, chunk: int, count: int
) -> Tensor:
    """Select as :func:`select_largest` does, but ``count`` of each ``chunk`` consecutive elements.

    If the last chunk has fewer elements than ``count``, all of them are selected.
    """
    _check(gradient, error)
    if not 1 <= count <= chunk:
        raise CommHookError(f"expected to select 1 to {chunk} elements of each, found {count}")
    if kernel_backend_of(gradient) is None:
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
    if kernel_backend_of(gradient) is None:
        return native.select_above(gradient, error, threshold)
    selection = _Selection(gradient)
    selection.mark(error, 0, sample_rank=0, bound=_key(threshold, gradient.dtype))
    selection.count()
    indices = gradient.new_empty(selection.selected(), dtype=torch.int32)
    selection.list(indices)
    return indices


def add_and_check(gradient: Tensor, error: Tensor | None) -> Tensor:
    """Add ``error`` to ``gradient``; return () bool: whether a sum is not finite."""
    if kernel_backend_of(gradient) is None:
        return torch.tensor(select_above(gradient, error, math.inf).numel() > 0)
    _check(gradient, error)
    is_damaged = gradient.new_zeros((), dtype=torch.bool)
    kernel = kernel_name("add_and_check", TYPES[gradient.dtype])
    arguments = (gradient, error, gradient.numel(), is_damaged)
    launch(SELECTION, kernel, arguments, grid=streaming_blocks(gradient))
    return is_damaged


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
    if kernel_backend_of(indices) is None:
        native.draw_indices(seed, rotation, numel, indices)
    else:
        arguments = (seed, rotation, numel, count, indices)
        launch(SPARSE, kernel_name("draw"), arguments, grid=blocks_for(count))
    return indices


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Add ``values`` to ``out[indices]``. Values and ``out`` are of one dtype; indices differ.

    On a GPU, indices that are out of range are ignored.
    """
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
    if kernel_backend_of(out) is None:
        native.scatter_add(values, indices, out)
        return
    count = indices.numel()
    kernel = kernel_name("scatter_add", TYPES[out.dtype])
    launch(SPARSE, kernel, (values, indices, count, out.numel(), out), grid=blocks_for(count))


def _check(gradient: Tensor, error: Tensor | None) -> None:
    check_numbers(gradient, error)
    if gradient.numel() >= 2**31:
        raise CommHookError(
            f"expected fewer than 2^31 elements in a bucket, found {gradient.numel()}"
        )


class _Selection:
    """One run of the kernels of selection.cu, and the state that they share in device memory.

    See Note [Selection on the device]. The host knows all launches in advance, except the number of
    elements that reach a threshold.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self._numel = gradient.numel()
        self._type = TYPES[gradient.dtype]
        self._chunks = blocks_for(self._numel, _CHUNK)
        words = _STATE_BYTES // 8 + self._chunks * (_CHUNK // 64 + 1)
        self._state = gradient.new_empty(words, dtype=torch.int64)

    def mark(self, error: Tensor | None, count: int, *, sample_rank: int, bound: int) -> None:
        """Add the error; mark elements that reach the key of ``sample_rank`` in a sample.

        If ``sample_rank`` is 0, mark those that reach ``bound``.
        """
        gradient, numel, state = self._gradient, self._numel, self._state
        arguments = (gradient, error, numel, sample_rank, bound, state)
        self._launch("begin", arguments, min(1, self._chunks), _SAMPLING_THREADS)
        self._launch("mark", (gradient, error, numel, count, state), self._chunks)

    def refine(self) -> None:
        """Find the k-th largest key, from its highest digit to its lowest."""
        shift = 8 * self._gradient.itemsize
        blocks = min(self._chunks, _REFINING_BLOCKS)
        while shift > 0:
            width = min(shift, _DIGIT_BITS)
            shift -= width
            arguments = (self._gradient, self._numel, shift, width, self._state)
            self._launch("refine", arguments, blocks)

    def count(self) -> None:
        """Count the indices before each chunk."""
        self._launch("count", (self._gradient, self._numel, self._state), self._chunks)

    def selected(self) -> int:
        """Return the number of elements that reach the threshold. Waits for the device."""
        return int(self._state[_SELECTED].item()) if self._chunks > 0 else 0

    def list(self, indices: Tensor) -> None:
        """Write the selected indices."""
        arguments = (self._gradient, self._numel, self._state, indices.numel(), indices)
        self._launch("list", arguments, self._chunks)

    def _launch(
        self, name: str, arguments: tuple[Argument, ...], blocks: int, threads: int = THREADS
    ) -> None:
        launch(SELECTION, kernel_name(name, self._type), arguments, grid=blocks, block=threads)


def _sample_rank(gradient: Tensor, count: int) -> int:
    """Return the rank in a sample of a key that slightly more than ``count`` elements reach.

    The rank is four standard deviations above the expected number of samples among the ``count``
    largest elements. It is 0 for few elements: then all nonzero elements are candidates.
    """
    samples = _SAMPLE_BYTES // gradient.itemsize
    if gradient.numel() <= samples:
        return 0
    expected = count / gradient.numel() * samples
    return min(samples, int(expected + 4 * math.sqrt(expected) + 8))


def _key(threshold: float, dtype: torch.dtype) -> int:
    """Return the bits of a positive number rounded to ``dtype``."""
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    return int(torch.tensor(threshold, dtype=dtype).view(bits).item())
