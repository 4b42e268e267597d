"""Ranks: processes that keep their state between calls, over loopback and over shaped links."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forking import fork_worker, start_worker
from support.links import needs_links
from support.processes import is_running, wait_until

import commhooks.cluster.ranks
from commhooks.cluster import RankError, Ranks
from commhooks.cluster.links import shaped_link

_kept: list[int] = []


def add_ranks(rank: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def keep(rank: int, value: int) -> list[int]:
    _kept.append(value + rank)
    return _kept


def raise_on_one_rank(rank: int) -> None:
    if rank == 1:
        raise KeyError("lost")


def print_and_die(rank: int) -> None:
    print("about to die", flush=True)
    if rank == 1:
        os._exit(3)
    dist.barrier()


def child_and_sleep(rank: int, path: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    (Path(path) / str(rank)).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def test_state_is_kept_between_calls() -> None:
    with Ranks(2) as ranks:
        assert ranks(add_ranks) == [1.0, 1.0]
        ranks(keep, 10)
        assert ranks(keep, 20) == [[10, 20], [11, 21]]


class Counter:
    def __init__(self, rank: int, start: int) -> None:
        self.count = start + rank

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def test_an_object_is_kept_on_each_rank_and_made_anew_after_a_restart() -> None:
    with Ranks(2) as ranks:
        ranks.keep(Counter, 10)
        assert ranks.call(Counter.add, 1) == [11, 12]
        assert ranks.call(Counter.add, 1) == [12, 13]
        ranks.restart()
        assert ranks.call(Counter.add, 5) == [15, 16]
        ranks.keep(Counter, 20)
        assert ranks.call(Counter.add, 0) == [20, 21]


def test_an_error_names_its_rank() -> None:
    with Ranks(2) as ranks:
        with pytest.raises(KeyError, match="lost") as caught:
            ranks(raise_on_one_rank)
        assert "raised on rank 1 of 2" in "\n".join(caught.value.__notes__)


def test_the_error_of_a_dead_rank_contains_its_log() -> None:
    with Ranks(2) as ranks, pytest.raises(RankError, match=r"(?s)exit code 3.*about to die"):
        ranks(print_and_die)


def test_a_timeout_ends_all_processes(tmp_path: Path) -> None:
    with Ranks(2, timeout=5.0) as ranks, pytest.raises(TimeoutError, match=r"15\.0 s"):
        ranks(child_and_sleep, str(tmp_path))
    for rank in "01":
        for pid in (tmp_path / rank).read_text().split():
            wait_until(lambda pid=int(pid): not is_running(pid))


@needs_links
@pytest.mark.parametrize(
    "start", [fork_worker, pytest.param(start_worker, marks=pytest.mark.exhaustive)]
)
def test_ranks_over_a_shaped_link(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commhooks.cluster.ranks, "start_worker", start)
    with shaped_link(2, 1e9) as link, Ranks(2, link) as ranks:
        assert ranks(add_ranks) == [1.0, 1.0]


@pytest.mark.exhaustive
def test_ranks_do_not_use_a_host_name(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = "from commhooks.cluster import Ranks\nwith Ranks(1):\n    pass\n"
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),  # torch creates it on import
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert list(temporary.iterdir()) == []
