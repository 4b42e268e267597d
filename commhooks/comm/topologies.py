"""Topologies: the target of each rank in each step, for any number of ranks N.

A round gives every rank one target. A rank sends half of its value, keeps the other half, and adds
what arrives, so no round changes the sum over ranks. As a matrix, whose row i is the value of rank
i after the round: A = (I + P)/2 with P[target of i][i] = 1. The columns of A always sum to 1. If P
is a permutation, the rows do as well: each rank receives one message and holds an average.

With τ = ⌈log2 N⌉, in step t:

    ring            to the right in even steps, to the left in odd ones
    exponential     rank i to i + 2^(t mod τ). Within τ steps every rank hears from every other one;
                    if N is a power of two, all ranks then hold exactly the mean
    hypercube       ranks i and i xor 2^(t mod τ) to each other: the same, for a power of two only
    dissemination   exponential, with new labels on the ranks after every τ steps, so that partners
                    change each time (GossipGraD's rotation)
    random          a ring of all ranks, in a new random order in each step
    uniform         each rank to any other one, drawn independently: not a permutation. Some ranks
                    receive several messages, others none (Kempe et al. 2003)

Draws come from a seed that is the same on all ranks, so no communication is needed.

Sources: GossipGraD, https://arxiv.org/abs/1803.05880; exponential graphs in training: Assran et al.
2019, https://arxiv.org/abs/1811.10792, and Ying et al. 2021, https://arxiv.org/abs/2110.13363.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from commhooks.errors import CommHookError

Permutation = Literal["ring", "exponential", "hypercube", "dissemination", "random"]
"""Topologies in which every rank receives one message per step."""
Push = Literal["ring", "exponential", "hypercube", "dissemination", "random", "uniform"]
"""All topologies."""


@dataclass(frozen=True)
class Round:
    """Rank i sends to rank ``targets[i]``, another one; a single rank "sends" to itself."""

    targets: tuple[int, ...]

    def sources(self, rank: int) -> list[int]:
        """Return the ranks that send to ``rank``, in ascending order."""
        return [source for source, target in enumerate(self.targets) if target == rank]


def check_topology(topology: str, size: int) -> None:
    """Raise CommHookError if there is no such topology of ``size`` ranks."""
    if topology == "hypercube" and size & (size - 1) != 0:
        raise CommHookError(
            f"a hypercube needs a power of two as the number of ranks, found {size} ranks; "
            "'exponential' and 'dissemination' work alike with any number of ranks"
        )


def cycle_length(size: int) -> int:
    """Return τ = ⌈log2 N⌉: the fewest steps in which every rank can hear from every other one."""
    return (size - 1).bit_length()


@lru_cache(maxsize=64)
def round_at(topology: str, size: int, step: int, seed: int = 0) -> Round:
    """Return the round of ``step``, counted from 0, in a topology that passed check_topology."""
    if size == 1:
        return Round((0,))
    cycle = cycle_length(size)
    shift = 2 ** (step % cycle)
    match topology:
        case "ring":
            targets = _shifted(range(size), 1 if step % 2 == 0 else -1)
        case "exponential":
            targets = _shifted(range(size), shift)
        case "hypercube":
            targets = [rank ^ shift for rank in range(size)]
        case "dissemination":
            targets = _shifted(_shuffled(size, f"{seed}:{step // cycle}"), shift)
        case "random":
            targets = _shifted(_shuffled(size, f"{seed}:{step}"), 1)
        case _:
            draw = random.Random(f"{seed}:{step}")
            targets = [(rank + draw.randrange(1, size)) % size for rank in range(size)]
    return Round(tuple(targets))


def _shifted(ranks: Sequence[int], distance: int) -> list[int]:
    """Return the targets by rank, if each rank sends to the one ``distance`` behind it."""
    targets = [0] * len(ranks)
    for place, rank in enumerate(ranks):
        targets[rank] = ranks[(place + distance) % len(ranks)]
    return targets


def _shuffled(size: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(size), size)
