"""Check at start-up that all ranks have the same parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from reducer.agreement import check_agreement

__all__: list[str] = []

# Name, shape, strides and dtype of a parameter.
Description = tuple[str, tuple[int, ...], tuple[int, ...], str]


def verify_parameters(
    named_parameters: Sequence[tuple[str, torch.Tensor]], process_group: dist.ProcessGroup
) -> None:
    """Raise RuntimeError on every rank unless all have equal names, shapes, strides and dtypes.

    Collective over ``process_group``; see :func:`reducer.agreement.check_agreement`.
    """
    descriptions = [
        (name, tuple(parameter.shape), parameter.stride(), str(parameter.dtype))
        for name, parameter in named_parameters
    ]
    device = named_parameters[0][1].device
    check_agreement(
        descriptions, process_group, device, _explain, "the comparison of the ranks' parameters"
    )


def _explain(of_ranks: Sequence[Sequence[Description]]) -> RuntimeError:
    """Describe the first difference between rank 0 and another rank."""
    reference = of_ranks[0]
    rank = next(rank for rank, theirs in enumerate(of_ranks) if theirs != reference)
    theirs = of_ranks[rank]
    for index, (a, b) in enumerate(zip(reference, theirs, strict=False)):
        if a != b:
            difference = f"parameter {index} is {_text(a)} on rank 0 but {_text(b)} on rank {rank}"
            break
    else:
        extra = max(reference, theirs, key=len)[min(len(reference), len(theirs))]
        difference = (
            f"{len(reference)} require gradients on rank 0, {len(theirs)} on rank {rank}; the "
            f'first that only one of them has is "{extra[0]}"'
        )
    return RuntimeError(
        f"Ranks have different parameters: {difference}. Build the model in the same way on all "
        "ranks (same configuration, same order)."
    )


def _text(description: Description) -> str:
    name, shape, strides, dtype = description
    return f'"{name}" (shape {list(shape)}, strides {list(strides)}, {dtype})'
