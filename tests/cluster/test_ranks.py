"""run_ranks: results by rank, errors with their rank, and no process left behind.

With processes that are forked, as in all other tests, and with those that the package starts.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forking import can_fork, fork_worker, start_worker
from support.processes import is_running, wait_until

import commhooks
import commhooks.cluster.ranks
from commhooks import CommHookError
from commhooks.cluster import LaunchedRanks, RankPool, Ranks, RankStartError
from commhooks.cluster.ranks import RankProcess
from commhooks.cluster.worker import Call
from commhooks.testing import RankError, close_ranks
from commhooks.testing import ranks as testing_ranks


def add_ranks(rank: int, world_size: int, offset: int, *, scale: int = 1) -> tuple[int, float, int]:
    total = torch.tensor(float(rank * scale + offset))
    dist.all_reduce(total)
    assert dist.get_world_size() == world_size
    return rank, total.item(), os.getpid()


def raise_on_one_rank(rank: int, _: int) -> None:
    if rank == 1:
        raise KeyError("lost")
    dist.barrier()  # waits for rank 1 and fails when it leaves


def change_environment(rank: int, world_size: int) -> dict[str, str]:
    before = dict(os.environ)
    os.environ["WORLD_SIZE"] = "7"
    del os.environ["PATH"]
    return before


class UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


def raise_unpicklable(rank: int, _: int) -> None:
    if rank == 0:
        raise UnpicklableError(1, 2)


def return_unpicklable(_rank: int, _: int) -> Any:
    return lambda: None


def sleep_on_one_rank(rank: int, _: int) -> None:
    if rank == 1:
        time.sleep(600)


def die_on_one_rank(rank: int, _: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def pid(_rank: int, _: int) -> int:
    return os.getpid()


def abort_on_one_rank(rank: int, _: int) -> None:
    if rank == 1:
        os.abort()
    time.sleep(600)


def warn(_rank: int, _: int) -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def connect_slowly(rank: int, _: int) -> None:
    """From the next call on."""
    connect = dist.init_process_group

    def connect_and_wait(*args: Any, **kwargs: Any) -> None:
        connect(*args, **kwargs)
        time.sleep(0.5)
        dist.connected = time.monotonic()

    if rank == 0:
        dist.init_process_group = connect_and_wait


def starting_time(rank: int, _: int) -> float:
    """When rank 0 has connected, and when the others start."""
    started: float = dist.connected if rank == 0 else time.monotonic()
    return started


def read_seed(_rank: int, _: int) -> int:
    return torch.initial_seed()


def hash_of_text(_rank: int, _: int) -> int:
    return hash("text")


def parent_pid(_rank: int, _: int) -> int:
    return os.getppid()


def number_of_threads(_rank: int) -> int:
    return torch.get_num_threads()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(fork_worker, marks=pytest.mark.skipif(not can_fork(), reason="CUDA")),
        pytest.param(start_worker, marks=pytest.mark.exhaustive if can_fork() else []),
    ],
)
def start(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The function that starts ranks in this module."""
    close_ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commhooks.cluster.ranks, "start_worker", request.param)
        yield request.param
        close_ranks()


@pytest.fixture
def run_ranks(start: Any, run_ranks: Any) -> Any:
    return run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_back_by_rank(run_ranks: Any, world_size: int) -> None:
    results = run_ranks(add_ranks, world_size, 5, scale=2)
    total = sum(2 * rank + 5 for rank in range(world_size))
    assert [result[:2] for result in results] == [(rank, total) for rank in range(world_size)]


def test_processes_are_used_again(run_ranks: Any) -> None:
    first, second = (run_ranks(add_ranks, 2, 0) for _ in range(2))
    assert [result[2] for result in first] == [result[2] for result in second]


def test_seeds_are_equal_on_all_ranks(run_ranks: Any) -> None:
    assert len(set(run_ranks(read_seed) + run_ranks(read_seed))) == 1


def test_strings_have_different_hashes_on_neighboring_ranks(run_ranks: Any) -> None:
    """As in a cluster: see Note [Two templates]."""
    close_ranks()  # neighbors that replace others may be of the same template
    first, second, third = run_ranks(hash_of_text, 3)
    assert first != second != third


def test_the_environment_is_that_of_the_caller(run_ranks: Any) -> None:
    assert run_ranks(change_environment, 2) == run_ranks(change_environment, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [fork_worker], indirect=True)
@pytest.mark.skipif(not can_fork(), reason="ranks are not forked where torch has CUDA")
def test_ranks_whose_template_died_are_replaced(run_ranks: Any) -> None:
    close_ranks()
    templates = run_ranks(parent_pid)
    assert len(set(templates)) == 2
    assert os.getpid() not in templates
    for template in templates:
        os.kill(template, signal.SIGKILL)
    wait_until(lambda: not any(each.is_alive() for each in testing_ranks._pool._processes))
    with pytest.raises(RankError, match=r"died before this call"):
        run_ranks(add_ranks, 2, 0)
    run_ranks(add_ranks, 2, 0)
    assert not set(run_ranks(parent_pid)) & set(templates)


def test_each_rank_has_the_threads_that_were_asked_for(start: Any) -> None:
    for threads in (1, 2):
        with Ranks(1, threads=threads) as ranks:
            assert ranks(number_of_threads) == [threads]


def test_no_rank_starts_before_all_are_connected(run_ranks: Any) -> None:
    """With Gloo one that has left already would stop those who are not."""
    run_ranks(connect_slowly, 3)
    try:
        connected, *starts = run_ranks(starting_time, 3)
    finally:
        close_ranks()
    assert connected <= min(starts)


def test_error_keeps_its_type_and_names_the_rank(run_ranks: Any) -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(raise_on_one_rank)
    note = "\n".join(caught.value.__notes__)
    assert "rank 1 of 2" in note
    assert "raise_on_one_rank" in note
    run_ranks(add_ranks, 2, 0)


def raise_after_the_peer(rank: int, _: int) -> None:
    if rank == 0:
        raise commhooks.CommHookPeerError("another rank failed")
    time.sleep(0.5)
    raise ValueError("the reason")


def test_the_error_of_a_rank_comes_before_that_of_its_peer(run_ranks: Any) -> None:
    with pytest.raises(ValueError, match="the reason"):
        run_ranks(raise_after_the_peer)


def leave(rank: int, _: int) -> None:
    raise SystemExit("enough")


def test_a_rank_that_leaves_does_not_end_this_process(run_ranks: Any) -> None:
    with pytest.raises(RankError, match=r"^SystemExit: enough\n"):
        run_ranks(leave)


def test_error_that_cannot_be_pickled(run_ranks: Any) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2.*UnpicklableError: 1 2"):
        run_ranks(raise_unpicklable)


def test_result_that_cannot_be_pickled(run_ranks: Any) -> None:
    with pytest.raises(Exception, match="lambda"):
        run_ranks(return_unpicklable)


def test_function_that_cannot_be_pickled(run_ranks: Any) -> None:
    with pytest.raises(Exception, match="lambda"):
        run_ranks(lambda rank, world_size: None)
    run_ranks(add_ranks, 2, 0)


def test_timeout_shows_where_the_rank_is(run_ranks: Any) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2") as caught:
        run_ranks(sleep_on_one_rank, timeout=10.0)
    assert "sleep_on_one_rank" in "\n".join(caught.value.__notes__)
    run_ranks(add_ranks, 2, 0)


def test_death_of_a_rank(run_ranks: Any) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 died with exit code -9"):
        run_ranks(die_on_one_rank)
    run_ranks(add_ranks, 2, 0)


def test_crash_shows_where_the_rank_was(run_ranks: Any) -> None:
    with pytest.raises(RankError, match=r"(?s)code -6\nits threads were.*in abort_on_one_rank"):
        run_ranks(abort_on_one_rank)


def test_death_between_calls(run_ranks: Any) -> None:
    pids = run_ranks(pid)
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not testing_ranks._pool._processes[1].is_alive())
    with pytest.raises(RankError, match=r"rank 1 of 2 died before this call with exit code -9"):
        run_ranks(add_ranks, 2, 0)
    run_ranks(add_ranks, 2, 0)


def test_warnings_are_treated_as_in_the_caller(run_ranks: Any) -> None:
    with pytest.raises(UserWarning, match="careful"):
        run_ranks(warn)


def test_a_rank_that_imports_the_main_module_starts_no_ranks(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would import it as well, and so on."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(CommHookError, match='start ranks under `if __name__ == "__main__":`'):
        Ranks(1)(number_of_threads)


@pytest.mark.exhaustive
def test_a_script_that_starts_ranks_when_it_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import os\n"
        "from commhooks.testing import run_ranks\n"
        f"with open({str(tmp_path / 'imports')!r}, 'a') as file:\n    file.write('.')\n"
        "def pid(rank, world_size):\n    return os.getpid()\n"
        "run_ranks(pid, 1)\n"
    )
    result = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 1
    assert "RankStartError: rank 0 of 1 cannot import the main module" in result.stderr
    assert 'start ranks under `if __name__ == "__main__":`' in result.stderr
    assert len((tmp_path / "imports").read_text()) <= 3


def test_a_rank_that_hangs_ends_when_its_input_is_closed(start: Any) -> None:
    """As when its parent is killed."""
    rank = RankProcess((), {}, keep_log=False)
    try:
        assert rank.receive() is None  # ready
        rank.send(Call(time.sleep, (600,), {}, 600.0))
        rank._process.stdin.close()
        assert rank._process.wait(30) == 1
    finally:
        rank.kill()


def test_a_rank_that_ends_while_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankProcess((), {}, keep_log=False)
    assert rank.receive() is None  # ready
    rank.send(Call(os._exit, (3,), {}, 600.0))
    assert rank.exit_code() == 3
    monkeypatch.setattr(rank, "is_alive", lambda: True)  # as it was just before
    rank.kill()
    assert rank.connection.closed


class Kept:
    """As a CUDA graph, which a process group waits for when it is destroyed."""


seen: list[Any] = []


def fail_with_a_local() -> None:
    kept = Kept()
    seen.append(weakref.ref(kept))
    raise ValueError(type(kept).__name__)


def look() -> None:
    seen.append(seen[0]() is None)


def last_seen() -> Any:
    return seen[-1]


def test_the_frames_of_a_failed_call_are_gone_after_it() -> None:
    rank = RankProcess((), {}, keep_log=False)
    try:
        assert rank.receive() is None  # ready
        rank.send(Call(fail_with_a_local, (), {}, 60.0, look))
        result = rank.receive()
        assert result is not None
        assert isinstance(result.error, ValueError)
        assert rank.receive() is None
        rank.send(Call(last_seen, (), {}, 60.0))
        result = rank.receive()
        assert result is not None
        assert result.value is True
    finally:
        rank.kill()


def test_the_stacks_of_a_rank_that_gets_no_core_for_a_second() -> None:
    rank = RankProcess((), {}, keep_log=False)
    try:
        assert rank.receive() is None  # ready
        pid = rank._process.pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
        assert "in serve" in rank.stacks()
    finally:
        rank.kill()


@pytest.mark.exhaustive
def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(
        "import os\nimport time\n"
        "from commhooks.testing import run_ranks\n"
        "def pid(rank, world_size):\n    return os.getpid()\n"
        "def hang(rank, world_size):\n    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    print(*run_ranks(pid), flush=True)\n"
        "    run_ranks(hang)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_rank_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commhooks.cluster.ranks, "start_worker", start_worker)
    monkeypatch.setattr(commhooks.cluster.ranks, "_START_SECONDS", 0.1)
    pool = RankPool([["sh", "-c", "exec sleep 5"]])  # in place of the rank
    with pytest.raises(RankStartError, match=r"^rank 0 did not start within 0\.1 s$"):
        pool.run(pid, 1, timeout=60)
    assert not pool._processes


def go_on_without_rank_1(rank: int, size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    with LaunchedRanks() as ranks:
        ranks.restart()
        if rank == 1:
            store.wait(["rank 0 goes on"])
            dist.destroy_process_group()
            return
        store.set("rank 0 goes on", "")
        with pytest.raises(CommHookError, match="the ranks cannot go on after an error"):
            ranks.restart()


def test_ranks_of_a_job_do_not_go_on_without_one_of_them(run_ranks: Any) -> None:
    run_ranks(go_on_without_rank_1, 2)
