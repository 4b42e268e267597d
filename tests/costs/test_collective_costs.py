import math

import pytest

from commhooks import CommHookError
from commhooks.costs.backends import NCCL, Gloo
from commhooks.costs.network import Link, Network
from commhooks.costs.step_trace import Collective, Members

GLOO = Gloo(round_seconds=3.0, message_cpu_seconds=1.0, byte_cpu_seconds=0.5)
WIRED = Link(8000.0, latency_seconds=10.0, payload_share=1.0)
INNER = Link(8000.0, latency_seconds=100.0, payload_share=1.0)


NODES = Network(8, WIRED, INNER, ranks_per_node=2)


def network(size: int, ranks_per_node: int = 1) -> Network:
    return Network(size, WIRED, INNER, ranks_per_node)


def collective(operation: str, nbytes: float, size: int, ranks_per_node: int = 1) -> Collective:
    members = Members(ranks_per_node, spans_nodes=size > ranks_per_node)
    return Collective(operation, nbytes, members)


@pytest.mark.parametrize(
    ("operation", "sent", "messages", "rounds"),
    [
        ("all_reduce", 2 * 3 * 250, 6, 6),
        ("reduce_scatter", 2 * 3 * 250, 6, 6),
        ("all_gather", 3 * 1000, 3, 3),
        ("all_to_all", 3 * 250, 3, 1),
        ("sendrecv", 1000, 1, 1),
        ("push", 1000, 1, 1),
        ("broadcast", 2 * 1000, 2, 2),
        ("vote", 0, 2, 2),
    ],
)
def test_gloo_among_four_nodes(operation, sent, messages, rounds):
    nbytes = 0 if operation == "vote" else 1000
    cost = GLOO.cost(collective(operation, nbytes, 4), network(4))
    assert cost.link_bytes == pytest.approx(sent)
    assert cost.node_bytes == 0
    assert cost.latency_seconds == pytest.approx(rounds * (2.0 + 10.0))
    assert cost.cpu_seconds == pytest.approx(messages * 1.0 + sent * 0.5)


def test_a_ring_leaves_each_node_once():
    # 8 ranks on 2 nodes: a part spends 2/8 of 14 rounds between nodes.
    cost = GLOO.cost(collective("all_reduce", 800, 8, 4), network(8, 4))
    assert cost.link_bytes == cost.node_bytes == pytest.approx(14 * 100)
    assert cost.latency_seconds == pytest.approx(14 * 2.0 + 3.5 * 10.0 + 10.5 * 100.0)


def test_in_an_all_to_all_the_ranks_of_a_node_share_its_link():
    # Each of 4 ranks sends 4 of its 7 parts to the other node.
    cost = GLOO.cost(collective("all_to_all", 800, 8, 4), network(8, 4))
    assert cost.link_bytes == pytest.approx(4 * 4 * 100)
    assert cost.node_bytes == pytest.approx(3 * 100)


@pytest.mark.parametrize("backend", [GLOO, NCCL()], ids=["gloo", "nccl"])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all", "sendrecv"])
def test_parallel_groups_share_the_links_of_their_nodes(backend, operation):
    one, two = (
        backend.cost(Collective(operation, 1e6, Members(1, spans_nodes=True, parallel=n)), NODES)
        for n in (1, 2)
    )
    assert two.link_bytes == 2 * one.link_bytes > 0
    assert (two.node_bytes, two.latency_seconds) == (one.node_bytes, one.latency_seconds)


def test_collectives_inside_a_node_do_not_use_the_network():
    inside = Collective("all_reduce", 800, Members(4, spans_nodes=False))
    for backend in (GLOO, NCCL()):
        cost = backend.cost(inside, network(8, 4))
        assert cost.link_bytes == 0
        assert cost.node_bytes >= 2 * 3 * 200


def test_a_broadcast_uses_a_tree_of_nodes_and_then_of_ranks():
    cost = GLOO.cost(collective("broadcast", 100, 32, 8), network(32, 8))
    assert (cost.link_bytes, cost.node_bytes) == (2 * 100, 3 * 100)


def test_nccl_uses_a_tree_for_few_bytes_and_a_ring_for_many():
    fast = Network(64, Link(200e9, 0.0, 1.0), Link(3.6e12, 0.0, 1.0), 8)
    little = NCCL().cost(collective("all_reduce", 1e3, 64, 8), fast)
    assert little.latency_seconds == pytest.approx(4.4e-6 + 14 * 0.52e-6 + 6 * 5.0e-6)
    assert little.link_bytes == pytest.approx(2e3 / 0.9)
    much = NCCL().cost(collective("all_reduce", 1e9, 64, 8), fast)
    assert much.latency_seconds == pytest.approx(8.4e-6 + 112 * 3.4e-6 + 14 * 9.6e-6)
    assert much.link_bytes == pytest.approx(2 * 63 / 64 * 1e9)


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        ("all_reduce", 2 * 3 * 250),
        ("reduce_scatter", 3 * 250),
        ("all_gather", 3 * 1000),
        ("all_to_all", 3 * 250),
        ("sendrecv", 1000),
        ("push", 1000),
        ("broadcast", 1000),
    ],
)
def test_nccl_among_four_nodes(operation, sent):
    slow = Network(4, Link(8.0, 0.0, 1.0), Link(8.0, 0.0, 1.0))
    cost = NCCL().cost(collective(operation, 1000, 4), slow)
    assert cost.link_bytes == pytest.approx(sent)
    assert cost.cpu_seconds == 0


@pytest.mark.parametrize("backend", [GLOO, NCCL()])
def test_an_unknown_collective_is_an_error(backend):
    with pytest.raises(ValueError, match="'scan'"):
        backend.cost(collective("scan", 1, 4), network(4))


def test_bad_networks_are_errors():
    with pytest.raises(CommHookError, match="10 ranks, 4 per node"):
        network(10, 4)
    with pytest.raises(CommHookError, match="positive rate"):
        Link(-1e9)
    with pytest.raises(CommHookError, match="positive rate"):
        Link(math.nan)
    with pytest.raises(CommHookError, match="latency of 0 or more"):
        Link(1e9, latency_seconds=-1e-6)
