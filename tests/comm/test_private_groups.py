"""Communicators of a hook's own, with simulated backends."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks.comm.private_groups import PrivateGroups, _options_like

CPU = torch.device("cpu")


@dataclass
class Config:
    max_ctas: int = -(2**31)
    min_ctas: int = -(2**31)


@dataclass
class Options:
    """Has the attributes of ProcessGroupNCCL.Options."""

    _timeout: Any = 600.0
    is_high_priority_stream: bool = False
    split_from: Any = None
    split_color: int = 0
    group_name: str = ""
    config: Config = field(default_factory=Config)


@pytest.mark.parametrize(("limit", "expected"), [(-(2**31), 8), (4, 4), (16, 8)])
def test_options_of_new_groups(limit: int, expected: int) -> None:
    """After init_process_group(device_id=...), options of subgroups name a parent to split."""
    found = _options_like(Options(30.0, True, object(), 3, "subgroup", Config(limit, 2)))
    assert found == Options(30.0, True, config=Config(expected, 2))


def test_least_resources_of_new_groups_are_not_above_the_most() -> None:
    """NCCL would refuse to connect."""
    assert _options_like(Options(config=Config(32, 16))).config == Config(8, 8)


class FakeBackend:
    """A backend whose destructor would abort what is under way, as NCCL's."""

    options = Options(timedelta(seconds=30), group_name="default_pg")

    def __init__(
        self, store: Any = None, rank: int = 0, size: int = 1, options: Any = None
    ) -> None:
        self.made_with = options
        self.calls: list[Any] = []

    def name(self) -> str:
        return "nccl"

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(device)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class FakeGroup:
    """A process group of one rank."""

    def _get_backend(self, _: torch.device) -> FakeBackend:
        return FakeBackend()

    def get_group_store(self) -> dist.Store:
        return dist.HashStore()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_communicators_connect_at_once_and_are_shut_down() -> None:
    group: Any = FakeGroup()
    groups = PrivateGroups(group, 7, CPU)
    fake: Any = groups.open(0)
    assert fake.calls == [CPU]
    assert fake.made_with.group_name == "commhooks/7/steps among 0"
    groups.close()
    assert fake.calls == [CPU, "shutdown"]
