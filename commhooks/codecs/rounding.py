"""Stochastic rounding, and the seeds of random numbers."""

import hashlib

import torch
from torch import Tensor

from commhooks import native
from commhooks.kernels import kernel_backend_of, launch
from commhooks.kernels.launcher import streaming_blocks
from commhooks.kernels.source import ROUNDING


def round_stochastically(values: Tensor, scale: float, out: Tensor, seed: int) -> Tensor:
    """Write ``scale * values`` to ``out``, bfloat16; return it.

    Each number becomes one of its two neighbors, so that the expected value is the number itself;
    beyond the largest finite number it rounds towards zero. Random numbers depend on ``seed`` (64
    bits) and on the position. Tensors are flat and contiguous. One pass over the memory of float32
    values; others are cast to float32 first. Does not wait for the device.
    """
    values = values.to(torch.float32)
    if values.numel() == 0:
        return out
    if kernel_backend_of(values) is None:
        native.round_stochastically(values, scale, out, seed)
    else:
        arguments = (values, values.numel(), float(scale), seed, out)
        launch(ROUNDING, ROUNDING.kernels[0], arguments, grid=streaming_blocks(values))
    return out


def bits_of(seed: str) -> int:
    """Return 64 bits for a seed."""
    return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little")
