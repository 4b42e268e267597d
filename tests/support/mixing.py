"""Mixing matrices of topologies, from their definition."""

import torch
from torch import Tensor

from commhooks.comm.topologies import Round


def can_be_built(topology: str, size: int) -> bool:
    return topology != "hypercube" or size in (1, 2, 4, 8, 16)


def mixing_matrix(round_: Round) -> Tensor:
    """From the definition: half of everything stays, the other half goes to the target."""
    size = len(round_.targets)
    matrix = torch.eye(size, dtype=torch.float64) / 2
    for rank, target in enumerate(round_.targets):
        matrix[target, rank] += 0.5
    return matrix
