"""The CUDA device that a rank takes, and what NCCL is told if ranks share one."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from commhooks.cluster.group import join_group, local_store, take_device


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with patch.dict(os.environ):
        for name in ("NCCL_HOSTID", "NCCL_MNNVL_ENABLE"):
            os.environ.pop(name, None)
        yield


def taken(rank: int, world_size: int, devices: int) -> tuple[int, str | None]:
    with (
        patch.object(torch.cuda, "device_count", lambda: devices),
        patch.object(torch.cuda, "set_device") as set_device,
        patch.dict(os.environ),
    ):
        take_device(rank, world_size)
        (chosen,) = set_device.call_args.args
        return chosen, os.environ.get("NCCL_HOSTID")


def test_each_rank_has_a_device() -> None:
    assert [taken(rank, 2, 4) for rank in range(2)] == [(0, None), (1, None)]


def test_ranks_that_share_devices_are_hosts_of_their_own() -> None:
    devices, hosts = zip(*(taken(rank, 4, 2) for rank in range(4)), strict=True)
    assert devices == (0, 1, 0, 1)
    assert None not in hosts
    assert len(set(hosts)) == 4


def test_a_host_id_of_the_user_is_kept() -> None:
    os.environ["NCCL_HOSTID"] = "mine"
    assert taken(1, 2, 1) == (0, "mine")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_no_device_is_an_error_before_anything_connects() -> None:
    store = local_store()
    with pytest.raises(RuntimeError, match=r"\[rank 0\] NCCL needs a CUDA device.*'gloo'"):
        join_group(0, 1, "127.0.0.1", store.port, 5.0, backend="nccl")
