"""Launches of selection.cu: select the elements of a gradient that a sparse hook sends.

Gradients and errors are flat, float32 or float64, with fewer than 2^31 elements. See Note
[Selection on the device].
"""

import math

import torch
from torch import Tensor

from commhooks.kernels.launcher import THREADS, Argument, blocks_for, launch, streaming_blocks
from commhooks.kernels.source import TYPES, Source, kernel_name

_KERNELS = ("begin", "mark", "refine", "count", "list", "add_and_check")
SOURCE = Source(
    "selection.cu",
    tuple(kernel_name(kernel, type_) for type_ in TYPES.values() for kernel in _KERNELS),
)

_WORD = 32  # elements per word of marks
_CHUNK = THREADS * _WORD
_SAMPLING_THREADS = 1024
_SAMPLE_BYTES = 64 * _SAMPLING_THREADS
_DIGIT_BITS = 11
_STATE_BYTES = 4 * (1 << _DIGIT_BITS) + 56
_SELECTED = 4  # its position in the state, in words of 64 bits
_REFINING_BLOCKS = 1024


def select_largest(gradient: Tensor, error: Tensor | None, count: int) -> Tensor:
    """Add ``error`` to ``gradient``; return the indices of the ``count`` largest magnitudes.

    (count,) int32, ascending. Of equal magnitudes the first are selected. Does not synchronize.
    """
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


def select_above(gradient: Tensor, error: Tensor | None, threshold: float) -> Tensor:
    """Add ``error`` to ``gradient``; return the indices of magnitudes of at least ``threshold``.

    int32, ascending. Waits for the device, to learn how many indices there are.
    """
    selection = _Selection(gradient)
    selection.mark(error, 0, sample_rank=0, bound=_key(threshold, gradient.dtype))
    selection.count()
    indices = gradient.new_empty(selection.selected(), dtype=torch.int32)
    selection.list(indices)
    return indices


def add_and_check(gradient: Tensor, error: Tensor | None) -> Tensor:
    """Add ``error`` to ``gradient``; return (1,): zero if all sums are finite, else NaN.

    Does not synchronize.
    """
    flag = gradient.new_zeros(1)
    kernel = kernel_name("add_and_check", TYPES[gradient.dtype])
    arguments = (gradient, error, gradient.numel(), flag)
    launch(SOURCE, kernel, arguments, grid=streaming_blocks(gradient))
    return flag


class _Selection:
    """One run of the kernels, and the state that they share in device memory.

    The host knows all launches in advance, except the number of elements that reach a threshold.
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
        launch(SOURCE, kernel_name(name, self._type), arguments, grid=blocks, block=threads)


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
