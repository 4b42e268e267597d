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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from commhooks.errors import CommHookError

__all__ = ["Permutation", "Push", "Round", "check_topology", "cycle_length", "round_at"]

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
    return _ROUNDS[topology](size, step, seed)


def _shift(size: int, distance: int) -> Round:
    return Round(tuple((rank + distance) % size for rank in range(size)))


def _ring(size: int, step: int, seed: int) -> Round:  # noqa: ARG001
    return _shift(size, 1 if step % 2 == 0 else -1)


def _exponential(size: int, step: int, seed: int) -> Round:  # noqa: ARG001
    return _shift(size, 2 ** (step % cycle_length(size)))


def _hypercube(size: int, step: int, seed: int) -> Round:  # noqa: ARG001
    side = 2 ** (step % cycle_length(size))
    return Round(tuple(rank ^ side for rank in range(size)))


def _dissemination(size: int, step: int, seed: int) -> Round:
    cycle = step // cycle_length(size)
    return _relabeled(_exponential(size, step, seed), _shuffled(size, f"{seed}:{cycle}"))


def _random(size: int, step: int, seed: int) -> Round:
    return _relabeled(_shift(size, 1), _shuffled(size, f"{seed}:{step}"))


def _uniform(size: int, step: int, seed: int) -> Round:
    draw = random.Random(f"{seed}:{step}")
    return Round(tuple((rank + draw.randrange(1, size)) % size for rank in range(size)))


def _relabeled(round_: Round, ranks: list[int]) -> Round:
    """Return the round in which ``ranks[i]`` takes the part of rank i."""
    targets = [0] * len(ranks)
    for label, target in enumerate(round_.targets):
        targets[ranks[label]] = ranks[target]
    return Round(tuple(targets))


def _shuffled(size: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(size), size)


_ROUNDS: Mapping[str, Callable[[int, int, int], Round]] = {
    "ring": _ring,
    "exponential": _exponential,
    "hypercube": _hypercube,
    "dissemination": _dissemination,
    "random": _random,
    "uniform": _uniform,
}
