"""Limits of the machine that memory shared by the ranks of a host meets."""

import ctypes
import errno
import functools
import itertools
import os
import platform
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commhooks import DistributedDataParallel
from commhooks.errors import CommHookPeerError
from commhooks.testing import run_ranks
from commhooks.testing.ranks import close_ranks
from reducer import host_memory
from reducer.native import HostGroup

ELEMENTS = [3_000_000, 5_000_000, 1000]
GRADIENT_BYTES = 4 * sum(ELEMENTS)
WAYS: list[tuple[dict[str, Any], str | None]] = [
    ({"gradient_as_bucket_view": True}, None),
    ({"lazy_bucket_allocation": True}, None),
    ({}, "fp16"),
    ({"gradient_as_bucket_view": True}, "bf16"),
    ({}, "hierarchical"),
]


class Net(nn.Module):
    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(n + more)) for n in ELEMENTS)

    def forward(self, value: float) -> Tensor:
        return sum((p * (value + i)).sum() for i, p in enumerate(self.parts))  # type: ignore[return-value]


def shared_file() -> str:
    return f"/proc/self/fd/{HostGroup().address[1]}"


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


# -------------------------------------------------------------------------- obstacles to connecting


@contextmanager
def no_large_files(bytes_left: int = GRADIENT_BYTES) -> Iterator[None]:
    with limited(resource.RLIMIT_FSIZE, Path(shared_file()).stat().st_size + bytes_left):
        yield


@contextmanager
def little_address_space(bytes_left: int = 2 * GRADIENT_BYTES) -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with limited(resource.RLIMIT_AS, pages * resource.getpagesize() + bytes_left):
        yield


@contextmanager
def no_more_files() -> Iterator[None]:
    with limited(resource.RLIMIT_NOFILE, 3):
        yield


@contextmanager
def as_another_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def while_sharing(limit: Callable[[], Any]) -> Iterator[None]:
    """Set a limit only while memory is shared.

    Nobody may import from the folder of this test as another user, and what is freed after a limit
    was set leaves room.
    """

    class Limited(HostGroup):
        def __init__(self) -> None:
            with limit():
                super().__init__()

        def connect(self, present: Any) -> None:
            with limit():
                super().connect(present)

        def check_room(self, shared: int, mapped: int) -> None:
            with limit():
                super().check_room(shared, mapped)

    with patch.object(host_memory, "HostGroup", Limited):
        yield


@contextmanager
def forbidden(number: int) -> Iterator[None]:
    """Let system call ``number`` fail in this thread, for good, as a seccomp filter of a container.

    The program is one for BPF: load the number, skip one instruction unless it is this one, return.
    """
    load, jump_if_equal, give_back = 0x20, 0x15, 0x06
    allow, fail = 0x7FFF0000, 0x00050000 | errno.EPERM
    instructions = [
        (load, 0, 0, 0),
        (jump_if_equal, 0, 1, number),
        (give_back, 0, 0, fail),
        (give_back, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *i) for i in instructions))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
    yield


OBSTACLES: dict[str, tuple[Callable[[], Any], str]] = {
    "file size": (no_large_files, r"a file of \d+ bytes \(ulimit -f: \d+ bytes\): File too large"),
    "no file": (
        functools.partial(no_large_files, 0),
        r"a file of \d+ bytes \(ulimit -f: \d+ bytes\): File too large",
    ),
    "address space": (
        functools.partial(while_sharing, little_address_space),
        r"mmap of \d+ bytes \(ulimit -v: \d+ bytes\): Cannot allocate memory",
    ),
    "open files": (
        functools.partial(while_sharing, no_more_files),
        r"\(ulimit -n: \d+\): Too many open files",
    ),
    "other user": (
        functools.partial(while_sharing, as_another_user),
        r"/proc/\d+/fd/\d+: Permission denied",
    ),
    "memfd_create": (functools.partial(forbidden, 319), "memfd_create: Operation not permitted"),
    "fallocate": (functools.partial(forbidden, 285), "posix_fallocate .*: Operation not permitted"),
    "pidfd_open": (functools.partial(forbidden, 434), "pidfd_open: Operation not permitted"),
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change the user")
needs_numbers = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="needs the numbers of system calls"
)
MARKS = {
    "other user": needs_root,
    "memfd_create": needs_numbers,
    "fallocate": needs_numbers,
    "pidfd_open": needs_numbers,
}


def in_thread(fn: Callable[[], Any]) -> Any:
    """Return ``fn()``, in a thread, which a seccomp filter ends with."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fn()))
    thread.start()
    thread.join()
    return results[0]


def gradients_after_steps(
    rank: int, model: DistributedDataParallel | TorchDDP, steps: int = 3
) -> list[Tensor]:
    for step in range(steps):
        model.zero_grad()
        model(1.0 + rank + step).backward()
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


def wrap(options: dict[str, Any], hook: str | None, more: int = 0) -> DistributedDataParallel:
    """Wrap with the hook. Two ranks are a node for ``hierarchical``."""
    hook_options = {"ranks_per_node": 2} if hook == "hierarchical" else {}
    return DistributedDataParallel(Net(more), hook=hook, hook_options=hook_options, **options)


def steps_with(
    rank: int,
    world_size: int,
    obstacle: str,
    on: list[int],
    options: dict[str, Any],
    hook: str | None,
) -> tuple[bool, list[str], bool]:
    """Return whether memory is shared, the warnings, and whether the gradients are torch's."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends programs that are not in Python
    dist.barrier()  # connects Gloo

    def wrap_within() -> tuple[DistributedDataParallel, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with OBSTACLES[obstacle][0]() if rank in on else nullcontext():
                model = wrap(options, hook)
        return model, [str(warning.message) for warning in caught]

    model, texts = in_thread(wrap_within)
    ours = gradients_after_steps(rank, model)
    expected = gradients_after_steps(rank, TorchDDP(Net()))
    return model.reducer.transport is not None, texts, all(map(torch.equal, ours, expected))


def check_gloo(results: list[tuple[bool, list[str], bool]], obstacle: str, on: list[int]) -> None:
    (_, (text,), _), *others = results  # one warning, on rank 0
    assert text.startswith(f"Ranks {on} cannot share memory"), text
    assert f"(rank {on[0]}: " in text
    assert re.search(OBSTACLES[obstacle][1], text), text
    assert "host_memory=False" in text
    assert [(shared, equal) for shared, _, equal in results] == [(False, True)] * len(results)
    assert [texts for _, texts, _ in others] == [[]] * len(others)


@pytest.mark.parametrize(
    ("obstacle", "on"),
    [
        *(pytest.param(name, [1], marks=MARKS.get(name, ())) for name in OBSTACLES),
        ("file size", [0]),
        ("file size", [0, 1]),
    ],
)
def test_all_ranks_use_gloo_if_one_meets_a_limit(obstacle: str, on: list[int]) -> None:
    if obstacle == "memfd_create":
        close_ranks()  # which have called it before
    check_gloo(run_ranks(steps_with, 2, obstacle, on, {}, None), obstacle, on)


@pytest.mark.parametrize(("options", "hook"), WAYS)
def test_it_does_with_every_way_to_use_the_memory(
    options: dict[str, Any], hook: str | None
) -> None:
    check_gloo(run_ranks(steps_with, 2, "file size", [1], options, hook), "file size", [1])


def test_four_ranks() -> None:
    results = run_ranks(steps_with, 4, "address space", [2, 3], {}, None)
    check_gloo(results, "address space", [2, 3])


def without_locked_memory(rank: int, world_size: int) -> bool:
    with limited(resource.RLIMIT_MEMLOCK, 0):
        model = DistributedDataParallel(Net())
        gradients_after_steps(rank, model)
        return model.reducer.transport is not None


def test_memory_is_not_locked() -> None:
    assert run_ranks(without_locked_memory, 2) == [True, True]


def alone(rank: int, world_size: int) -> bool:
    """Each rank is on a host of its own, and could not share memory."""
    with (
        patch.object(host_memory, "_identity", lambda: (str(rank),)),
        patch.object(host_memory, "HostGroup", side_effect=OSError("no memory")),
    ):
        return DistributedDataParallel(Net()).reducer.transport is None


def test_ranks_without_a_neighbor_need_not_be_warned() -> None:
    assert run_ranks(alone, 2) == [True, True]


# ------------------------------------------------------------------------------ within the limits


def lazy_steps(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Net(), lazy_bucket_allocation=True)
    before = Path(shared_file()).stat().st_size
    with no_large_files(2 * GRADIENT_BYTES):
        for _ in range(4):
            ours = gradients_after_steps(rank, model)
    assert Path(shared_file()).stat().st_size - before <= 2 * GRADIENT_BYTES
    assert all(map(torch.equal, ours, gradients_after_steps(rank, TorchDDP(Net()))))


def test_steps_share_no_new_parts_of_the_file() -> None:
    """Or a limit of the file size would end a training that allocates buckets in each step."""
    run_ranks(lazy_steps, 2)


def mapped_bytes(rank: int, world_size: int) -> int:
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    gradients_after_steps(rank, model)
    ranges = re.findall(
        r"^(\w+)-(\w+) .*/memfd:commhooks", Path("/proc/self/maps").read_text(), re.MULTILINE
    )
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_maps_two_slices_of_the_buckets_of_a_peer(world_size: int) -> None:
    own_and_peers = GRADIENT_BYTES * (1 + 2 * (world_size - 1) / world_size)
    for mapped in run_ranks(mapped_bytes, world_size):
        assert mapped == pytest.approx(own_and_peers, rel=0.02)


# ------------------------------------------------------------- limits that come after the wrapping


runs = itertools.count(1)


def lowered(
    rank: int, world_size: int, bad: int, options: dict[str, Any], hook: str | None, more: int
) -> tuple[str, str]:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    model = wrap(options, hook, more)
    assert model.reducer.transport is not None
    with no_large_files(0) if rank == bad else nullcontext():
        try:
            gradients_after_steps(rank, model)
        except RuntimeError as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("bad", "options", "hook"),
    [(0, {}, None), (1, {}, None), *((1, *way) for way in WAYS), (1, {}, "int8")],
)
def test_a_lower_limit_ends_the_step_on_all_ranks(
    bad: int, options: dict[str, Any], hook: str | None
) -> None:
    more = 2048 * next(runs)  # no part of the file that was free has the size of a bucket
    results = run_ranks(lowered, 2, bad, options, hook, more)
    (own, reason), (others, quotation) = results[bad], results[1 - bad]
    assert own == "RuntimeError"
    assert others == CommHookPeerError.__name__
    is_native = hook not in ("hierarchical", "int8")
    for text in [reason, quotation] if is_native else [reason]:
        assert f"[Rank {bad}] Cannot share memory" in text
        assert "ulimit -f" in text
        assert "host_memory=False" in text


class LargeThenSmall(nn.Module):
    """Backward begins with the large one, so the rank has the memory of the bucket then."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.zeros(100))
        self.large = nn.Parameter(torch.zeros(8_000_000))

    def forward(self, value: float) -> Tensor:
        small = (self.small * value).sum()
        return small + (self.large * value).sum()


def no_room_for_peers(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(LargeThenSmall(), bucket_cap_mb=100, stable_buckets=True)
    limits = []

    def lower(_: Tensor) -> None:
        if rank == 1:
            limits.append(little_address_space(-GRADIENT_BYTES))  # whatever is freed
            limits[0].__enter__()

    model.module.small.register_hook(lower)
    try:
        model(1.0).backward()
    except RuntimeError as error:
        return str(error)
    finally:
        for limit in limits:
            limit.__exit__(None, None, None)
    return ""


def test_address_space_may_be_missing_in_the_middle_of_a_step() -> None:
    for text in run_ranks(no_room_for_peers, 2):
        assert re.search(r"\[Rank 1\] Cannot share memory .*mmap of \d+ bytes \(ulimit -v", text)
        assert "host_memory=False" in text


# What a kernel does that returns EINTR for any signal, and one with 64 MiB left.
INTERRUPTED = """
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

int posix_fallocate(int file, off_t offset, off_t bytes) {
  static int calls;
  if (bytes > 16 << 20) return ETIME;
  if (calls++ % 2 == 0) return EINTR;
  if (offset > 64 << 20) return ENOSPC;
  return syscall(SYS_fallocate, file, 0, offset, bytes) == 0 ? 0 : errno;
}
"""
ALLOCATING = """
import os
import torch
from reducer.native import HostGroup

group = HostGroup()
group.connect({0: group.address})
used = lambda: os.stat(f"/proc/self/fd/{group.address[1]}").st_blocks * 512
memory = group.allocate(10_000_000, torch.float32).fill_(1)
assert memory.sum() == 10_000_000
before = used()
try:
    group.allocate(12_000_000, torch.float32)
except RuntimeError as error:
    assert "No space left" in str(error), error
else:
    raise AssertionError("expected an error")
assert used() == before
"""


def test_signals_do_not_end_an_allocation(tmp_path: Path) -> None:
    """A timer's signals are likely to come while memory is reserved."""
    source, library = tmp_path / "interrupted.c", tmp_path / "interrupted.so"
    source.write_text(INTERRUPTED)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    subprocess.run([sys.executable, "-c", ALLOCATING], env=environment, check=True)
