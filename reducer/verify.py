"""Start-up check: all ranks must have the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__: list[str] = []

# Name, shape, strides and dtype of a parameter.
Description = tuple[str, tuple[int, ...], tuple[int, ...], str]


def describe(name: str, parameter: torch.Tensor) -> Description:
    """What must agree between ranks for gradients to be exchanged."""
    return name, tuple(parameter.shape), parameter.stride(), str(parameter.dtype)


def verify_parameters(
    named_parameters: Sequence[tuple[str, torch.Tensor]], process_group: dist.ProcessGroup
) -> None:
    """Raise RuntimeError on every rank unless names, shapes, strides and dtypes agree everywhere.

    Costs one all-gather of eight bytes when they do; the details travel only when they do not.
    """
    size = process_group.size()
    if size == 1:
        return
    mine = [describe(name, parameter) for name, parameter in named_parameters]
    digest = hashlib.sha256(repr(mine).encode()).digest()[:8]
    device = named_parameters[0][1].device
    value = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)
    gathered = [torch.empty_like(value) for _ in range(size)]
    dist.all_gather(gathered, value, group=process_group)
    if all(torch.equal(value, other) for other in gathered):
        return
    everyone: list[list[Description]] = [[] for _ in range(size)]
    dist.all_gather_object(everyone, mine, group=process_group)
    raise RuntimeError(_first_difference(everyone))


def _first_difference(everyone: Sequence[Sequence[Description]]) -> str:
    reference = everyone[0]
    advice = "Build the model in the same way on all ranks (same configuration, same order)."
    for rank, theirs in enumerate(everyone[1:], start=1):
        for index, (a, b) in enumerate(zip(reference, theirs, strict=False)):
            if a != b:
                return (
                    "Ranks have different parameters: parameter "
                    f"{index} is {_text(a)} on rank 0 but {_text(b)} on rank {rank}. {advice}"
                )
        if len(theirs) != len(reference):
            longer = max(reference, theirs, key=len)
            extra = longer[min(len(reference), len(theirs))][0]
            return (
                f"Ranks have different parameters: {len(reference)} require gradients on rank 0, "
                f"{len(theirs)} on rank {rank}; the first that only one of them has is "
                f'"{extra}". {advice}'
            )
    raise AssertionError("digests differ, descriptions do not")


def _text(description: Description) -> str:
    name, shape, strides, dtype = description
    return f'"{name}" (shape {list(shape)}, strides {list(strides)}, {dtype})'
