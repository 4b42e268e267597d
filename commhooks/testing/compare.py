"""Compare named tensors, exactly or up to rounding, and describe the differences."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Gradients = Mapping[str, Tensor]

# Nearly all normally distributed numbers have a magnitude below this.
_LARGEST_NORMAL = 6


def mean_over_ranks(of_ranks: Sequence[Gradients], like: Gradients) -> dict[str, Tensor]:
    """Return the mean over ranks in float64. A missing gradient counts as zero."""
    zero = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in like.items()}
    return {
        name: torch.stack([named.get(name, zero[name]).double() for named in of_ranks]).mean(0)
        for name in like
    }


def differences(found: Gradients, expected: Gradients, terms: int) -> list[str]:
    """Describe where ``found`` differs from ``expected`` by more than ``terms`` roundings allow.

    The numbers must be normally distributed. The error of a rounding is at most eps times the
    largest partial sum.
    """
    problems = []
    for name, exact in expected.items():
        if name not in found:
            problems.append(f"{name}: expected a gradient, found none")
            continue
        dtype = found[name].dtype
        tolerance = _LARGEST_NORMAL * (terms + 1) * torch.finfo(dtype).eps
        error = (found[name].double() - exact).abs().max().item() if exact.numel() else 0.0
        if not error <= tolerance:
            problems.append(
                f"{name} of {dtype}: expected the mean to within {tolerance:.1e}, found it off by "
                f"{error:.1e}"
            )
    return problems


def disagreement(found: Gradients) -> list[str]:
    """Describe the first tensor that differs between ranks, if there is one. A collective."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, dict(found))
    for name in sorted({name for named in of_ranks for name in named}):
        for peer, named in enumerate(of_ranks):
            if not same_bits(named.get(name), of_ranks[0].get(name)):
                return [
                    f"{name}: expected the same bits on all ranks, but ranks 0 and {peer} differ"
                ]
    return []


def tensor_layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), str(tensor.device), tensor.stride()


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two values are equal; tensors in dicts and sequences, bit for bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same_kind = left.dtype == right.dtype and left.shape == right.shape
        return same_kind and torch.equal(_bytes(left), _bytes(right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same_bits, left, right))
    return bool(left == right)


def through_file(state: Any) -> Any:
    """Return ``state`` after saving it to a file and loading it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
