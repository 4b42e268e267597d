"""Which errors of backends and stores are the loss of a peer."""

import pytest
import torch
import torch.distributed as dist

from commhooks.testing import run_ranks
from reducer import peers
from reducer.peers import is_peer_loss

SIGNS = [
    "Application timeout caused pair closure",
    "Wait timeout",
    "wait timeout after 10000ms, keys: /default_pg/0//0/1/0",
    "Timed out waiting 10000ms for recv operation to complete",
    "Socket Timeout",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41",
    "Connect timeout [127.0.0.1]:29500",
    "Connection reset by peer",
    "Remote peer closed the connection.",
    "NCCL operation timed out",
    "NCCL Async Error: remote process exited or there was a network error",
    "NCCL communicator was aborted after a previous error",
]


@pytest.mark.parametrize("text", SIGNS)
def test_texts_of_backends_and_stores(text: str) -> None:
    assert is_peer_loss(RuntimeError(text))
    assert not is_peer_loss(ValueError(text))


@pytest.mark.parametrize(
    "text",
    [
        "NCCL Async Error: invalid usage",
        "Invalid timeout",
        "timeout must be positive",
        "a peer review",
    ],
)
def test_texts_of_other_errors(text: str) -> None:
    assert not is_peer_loss(RuntimeError(text))


@pytest.mark.parametrize(
    ("text", "is_loss"),
    [
        ("NCCL error: remote process exited or there was a network error", True),
        ("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", False),
        ("NCCL error: Cuda failure 2 'out of memory'", False),
        ("NCCL error: invalid usage", False),
    ],
)
def test_failures_of_the_own_device_are_no_lost_peers(text: str, is_loss: bool) -> None:
    assert is_peer_loss(dist.DistBackendError(text)) == is_loss


def open_connections(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    torch.set_default_device("mps")  # which is not there
    try:
        receives = peers._receives(peers.gloo_of(group))
    finally:
        torch.set_default_device(None)
    dist.barrier()
    peers.abort_works(receives.values())
    assert set(receives) == {1 - rank}


def test_lost_peers_are_found_under_a_default_device() -> None:
    run_ranks(open_connections, 2)
