"""PowerSGD on one bucket of several matrices, on ranks in lockstep."""

from collections.abc import Iterator

import torch
from torch import Tensor

from commhooks import CommHook
from commhooks.algorithms.lowrank.powersgd import PowerSGD
from support.lockstep import draw_gradients

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "first": (23, 17),
    "bias": (23,),
    "empty": (0, 5),
    "second": (23, 17),
    "convolution": (9, 5, 3, 3),
    "third": (23, 17),
}
MATRICES = ("first", "second", "third", "convolution")


def powersgd(**options: object) -> PowerSGD:
    return PowerSGD(**{"rank": 2, "min_compression_rate": 1.0, "start_step": 0} | options)


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return draw_gradients(SHAPES, rank, step, dtype)


def by_name(flat: Tensor) -> dict[str, Tensor]:
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    parts = zip(SHAPES.items(), flat.split(sizes), strict=True)
    return {name: part.view(shape) for (name, shape), part in parts}


def mean_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0)


def tensors_of(state: dict[str, dict[str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    for key, entry in state.items():
        for name, tensor in entry.items():
            yield key, name, tensor


def assert_same_state(left: CommHook, right: dict[str, dict[str, Tensor]]) -> None:
    found = {(key, name): tensor for key, name, tensor in tensors_of(left.state)}
    expected = {(key, name): tensor for key, name, tensor in tensors_of(right)}
    assert found.keys() == expected.keys()
    for place, tensor in found.items():
        assert torch.equal(tensor, expected[place]), place
