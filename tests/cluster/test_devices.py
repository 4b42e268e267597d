"""The CUDA device that a rank takes, and what NCCL is told if ranks share one."""

import os
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks.cluster.ranks
from commhooks.cluster import CPU, Device, DeviceError, LaunchedRanks, RankPool, Ranks
from commhooks.cluster.device import take_device
from commhooks.cluster.group import join_group, local_store
from commhooks.cluster.links import ShapedLink

NCCL = ("NCCL_HOSTID", "NCCL_MNNVL_ENABLE", "NCCL_NET")
LOCAL_RANK = "LOCAL_RANK"


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with patch.dict(os.environ):
        for name in (*NCCL, LOCAL_RANK, "COMMHOOKS_DEVICE"):
            os.environ.pop(name, None)
        yield


def taken(
    rank: int, world_size: int, devices: int, host: str | None = None
) -> tuple[int, list[str | None]]:
    with (
        patch.object(torch.cuda, "device_count", lambda: devices),
        patch.object(torch.cuda, "set_device") as set_device,
        patch.dict(os.environ),
    ):
        take_device(rank, world_size, host)
        (chosen,) = set_device.call_args.args
        assert int(os.environ[LOCAL_RANK]) % devices == chosen  # what torch 2.15 goes by
        return chosen, [os.environ.get(name) for name in NCCL]


def test_each_rank_has_a_device() -> None:
    assert [taken(rank, 2, 4) for rank in range(2)] == [(0, [None] * 3), (1, [None] * 3)]


def test_ranks_that_share_devices_are_hosts_of_their_own() -> None:
    devices, variables = zip(*(taken(rank, 4, 2) for rank in range(4)), strict=True)
    assert devices == (0, 1, 0, 1)
    assert len({host for host, _, _ in variables} - {None}) == 4
    assert {tuple(others) for _, *others in variables} == {("0", None)}


def test_a_host_id_of_the_user_is_kept() -> None:
    os.environ["NCCL_HOSTID"] = "mine"
    assert taken(1, 2, 1) == (0, ["mine", "0", None])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_no_device_is_an_error_before_anything_connects() -> None:
    store = local_store()
    with pytest.raises(RuntimeError, match=r"\[rank 0\] NCCL needs a CUDA device.*'gloo'"):
        join_group(0, 1, "127.0.0.1", store.port, 5.0, backend="nccl")


def test_ranks_behind_links_are_hosts_and_use_sockets() -> None:
    """NCCL would go around a link between two devices of one machine."""
    assert taken(1, 2, 2, "h1") == (1, ["h1", "0", "Socket"])
    assert taken(1, 2, 1, "h1") == (0, ["h1, rank 1", "0", "Socket"])
    link = ShapedLink((("ip", "netns", "exec", "h0"), ("ip", "netns", "exec", "h1")))
    assert link.hosts == ["h0", "h1"]


def variables(rank: int) -> list[str | None]:
    return [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]


def test_both_libraries_use_the_same_interface() -> None:
    with Ranks(1) as ranks:
        assert ranks(variables) == [["lo", "lo"]]


def test_the_environment_chooses_for_those_who_name_no_device() -> None:
    with patch.object(torch.cuda, "is_available", lambda: True):
        os.environ["COMMHOOKS_DEVICE"] = "cpu"
        assert Device.choose(None) == CPU
        assert Device.choose("cuda") == Device.choose(torch.device("cuda")) == Device("cuda")
        assert Device.choose(torch.device("cpu")) == CPU
        with pytest.raises(DeviceError, match="found 'cuda:1'; CUDA_VISIBLE_DEVICES"):
            Device.choose(torch.device("cuda:1"))
        os.environ["COMMHOOKS_DEVICE"] = "tpu"
        with pytest.raises(DeviceError, match=r"'cpu' or 'cuda' in COMMHOOKS_DEVICE, found 'tpu'$"):
            Device.choose(None)
    os.environ["COMMHOOKS_DEVICE"] = "cuda"
    with (
        patch.object(torch.cuda, "is_available", lambda: False),
        pytest.raises(DeviceError, match=r"a CUDA device in COMMHOOKS_DEVICE, and torch .* none"),
    ):
        Device.choose(None)


@pytest.mark.parametrize("has_cuda", [False, True])
def test_the_default_is_cuda_where_torch_finds_a_device(has_cuda: bool) -> None:
    with patch.object(torch.cuda, "is_available", lambda: has_cuda):
        found = Device.choose(None)
    assert found == Device("cuda" if has_cuda else "cpu")
    assert found.backend == ("nccl" if has_cuda else "gloo")
    assert Device.choose(found) is found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cuda", "expected a CUDA device, and torch .* finds none; use 'cpu'"),
        ("cuda:1", "found 'cuda:1'; CUDA_VISIBLE_DEVICES chooses"),
        ("tpu", "expected the device 'cpu' or 'cuda', found 'tpu'$"),
    ],
)
def test_other_devices_are_refused(name: str, says: str) -> None:
    with (
        patch.object(torch.cuda, "is_available", lambda: False),
        pytest.raises(DeviceError, match=says),
    ):
        Device.choose(name)


def test_ranks_that_share_a_device() -> None:
    cuda = Device("cuda")
    with patch.object(torch.cuda, "device_count", lambda: 2):
        assert [cuda.sharing(ranks) for ranks in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert CPU.sharing(8) == 1


def test_what_is_put_on_a_device() -> None:
    cuda = Device("meta")  # which needs no device
    found = cuda.put({"x": (torch.ones(2), [torch.ones(3), 4]), "model": nn.Linear(2, 3)})
    assert found["x"][0].is_meta
    assert found["x"][1][0].is_meta
    assert found["x"][1][1] == 4
    assert found["model"].weight.is_meta
    assert CPU.put(found) is found


class OtherGroup:
    """A process group of another backend is there already."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def get_backend() -> str:
        return "gloo"


def group_timeout(rank: int) -> timedelta:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with patch.dict(os.environ, place), LaunchedRanks(timeout=7.0):
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        found: timedelta = backend.options._timeout
        return found


def test_ranks_of_a_job_wait_as_long_as_they_are_told() -> None:
    pool = RankPool()
    try:
        assert pool.run(group_timeout, 1, timeout=60) == [timedelta(seconds=7)]
    finally:
        pool.close()


def test_a_group_of_another_backend_is_refused() -> None:
    with (
        patch.object(commhooks.cluster.ranks, "dist", OtherGroup),
        patch.object(Device, "__str__", lambda _: "2 x a device"),
        pytest.raises(DeviceError, match="process group of nccl for ranks on 2 x a device, found"),
    ):
        LaunchedRanks(Device("cuda"))
