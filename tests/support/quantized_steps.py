"""Hooks that quantize, with small blocks, on one bucket and on ranks in lockstep."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import commhooks
from commhooks import CommHook
from support.lockstep import draw_gradients

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "matrix": (23, 17),
    "bias": (23,),
    "empty": (0, 5),
    "convolution": (9, 5, 3, 3),
}
NUMEL = 1 + 23 * 17 + 23 + 9 * 5 * 9

# Options and bits per code of each hook, with small blocks so that there are many of them.
WITH_ERRORS: dict[str, tuple[dict[str, Any], int]] = {
    "int8": ({"block_size": 32}, 8),
    "int4": ({"block_size": 32, "stochastic": True}, 4),
    "int2": ({"block_size": 32}, 2),
    "fp8": ({"block_size": 64, "format": "e5m2"}, 8),
    "fp4": ({"format": "mxfp4"}, 4),
    "onebit": ({"block_size": 32}, 1),
    "signsgd": ({"block_size": 32}, 1),
}
STATELESS: dict[str, tuple[dict[str, Any], int]] = {
    "int8": ({"block_size": 32, "stochastic": True, "error_feedback": False}, 8),
    "int4": ({"block_size": 32, "error_feedback": False}, 4),
    "int2": ({"block_size": 32, "error_feedback": False}, 2),
    "fp8": ({"block_size": 32, "error_feedback": False}, 8),
    "fp4": ({"error_feedback": False}, 4),
    "qsgd": ({"block_size": 32, "levels": 5, "norm": "l2"}, 4),
    "terngrad": ({"block_size": 32}, 2),
    "natural": ({"block_size": 32}, 8),
    "signsgd": ({"block_size": 32, "error_feedback": False}, 1),
}
AVERAGE_BITS = {"terngrad": 4}
"""Bits per code of an average, if they differ."""
ALL = [(name, *rest) for named in (WITH_ERRORS, STATELESS) for name, rest in named.items()]
UNBIASED = [
    ("int8", {"stochastic": True, "error_feedback": False}),
    ("int4", {"stochastic": True, "error_feedback": False}),
    ("qsgd", {}),
    ("qsgd", {"levels": 1, "norm": "l2"}),
    ("terngrad", {"clip": 0.0}),
    ("natural", {}),
]


def make_hooks(name: str, options: dict[str, Any], size: int) -> list[CommHook]:
    return [commhooks.create(name, **options) for _ in range(size)]


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return draw_gradients(SHAPES, rank, step, dtype)


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in named.values()]).double()


def mean_of(gradients: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([flat(named) for named in gradients]).mean(0)


def unsent(hooks: list[CommHook], names: Iterator[str] | dict[str, Any]) -> dict[str, Tensor]:
    """Return, by parameter, the mean of the ranks' own errors plus the errors of averages."""
    total = {}
    for name in names:
        entries = [hook.state[name] for hook in hooks]
        total[name] = torch.stack([e["error"].double() for e in entries]).mean(0).reshape(-1)
        for entry in entries:
            if "average_error" in entry:
                start = int(entry["average_start"])
                kept = entry["average_error"]
                total[name][start : start + kept.numel()] += kept
    return total


def part_length(numel: int, size: int) -> int:
    """Return the length of a rank's part, rounded up to a multiple of 32."""
    return min((numel + 32 * size - 1) // (32 * size) * 32, numel)
