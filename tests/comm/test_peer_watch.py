"""Neighbors in the ring of ranks watch each other: Note [Messages that never end]."""

import pytest

from commhooks.comm.peer_watch import ring_pairs


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2), (1, 5, 7, 9), tuple(range(9))])
def test_all_neighbors_connect_in_three_rounds(ranks: tuple[int, ...]) -> None:
    waiting = {rank: ring_pairs(rank, ranks) for rank in ranks}
    connected = []
    for _ in range(3):
        met = [
            pair
            for pair in {pairs[0] for pairs in waiting.values() if pairs}
            if all(waiting[rank][:1] == [pair] for rank in pair)
        ]
        for pair in met:
            for rank in pair:
                waiting[rank].remove(pair)
        connected += met
    ring = {(min(pair), max(pair)) for pair in zip(ranks, (*ranks[1:], ranks[0]), strict=True)}
    assert sorted(connected) == sorted(ring)
