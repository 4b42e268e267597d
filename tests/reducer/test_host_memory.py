"""Ranks of one host average through memory that they share. Note [Host memory]."""

import ctypes
import functools
import os
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dying_ranks import set_timeout
from support.instruction_sets import instruction_sets, use_instruction_set
from torch import Tensor, nn

import commhooks
from commhooks import DistributedDataParallel
from commhooks.lab.comparison.entry import Entry
from commhooks.testing import run_ranks
from reducer.native import HostGroup

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Odd sizes: less than a page, no whole number of pages, fewer pages than ranks, none at all.
SIZES = [1, 7, 1023, 0, 1025, 5000, 70_001]


class Many(nn.Module):
    """Parameters of odd sizes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in SIZES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.parts, gradients, strict=True))  # type: ignore[return-value]


def gradients_of(rank: int, dtype: torch.dtype, step: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(n, generator=generator).to(dtype) for n in SIZES]


over_gloo = functools.partial(DistributedDataParallel, host_memory=False)


def uses_host_memory(model: DistributedDataParallel) -> bool:
    return model.reducer.transport is not None


# ----------------------------------------------------------------------------------------- numbers


def averages(
    rank: int, world_size: int, dtype: torch.dtype, hook: str, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    models = [
        DistributedDataParallel(Many(dtype), bucket_cap_mb=0.02, **options),
        over_gloo(Many(dtype), bucket_cap_mb=0.02, **options),
    ]
    assert [uses_host_memory(model) for model in models] == [True, False]
    for step in range(4):  # buckets are rebuilt after the first
        for model in models:
            commhooks.handle_of(model) or commhooks.register(model, hook)
            model.zero_grad()
            model(gradients_of(rank, dtype, step)).backward()
    first, second = ([p.grad.clone() for p in model.parameters()] for model in models)  # type: ignore[union-attr]
    return first, second


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("hook", ["allreduce", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_get_the_bits_of_gloo(dtype: torch.dtype, hook: str, views: bool) -> None:
    for ours, gloos in run_ranks(averages, 2, dtype, hook, {"gradient_as_bucket_view": views}):
        assert all(torch.equal(a, b) for a, b in zip(ours, gloos, strict=True))


def averages_on(rank: int, world_size: int, name: str, hook: str) -> bool:
    use_instruction_set(name)
    try:
        options = {"gradient_as_bucket_view": True}
        ours, gloos = averages(rank, world_size, torch.float32, hook, options)
    finally:
        use_instruction_set(instruction_sets()[-1])
    return all(map(torch.equal, ours, gloos))


@pytest.mark.parametrize("hook", ["allreduce", "bf16", "fp16"])
@pytest.mark.parametrize("name", instruction_sets())
def test_views_get_the_same_bits_by_all_instructions(name: str, hook: str) -> None:
    assert run_ranks(averages_on, 2, name, hook) == [True] * 2


def uneven(rank: int, world_size: int, views: bool) -> None:
    options = {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": views}
    models = [DistributedDataParallel(Many(), **options), over_gloo(Many(), **options)]
    for model in models:
        commhooks.register(model, "bf16")
        with model.join():
            for step in range(1 + 2 * rank):
                model.zero_grad()
                model(gradients_of(rank, torch.float32, step)).backward()
    for ours, gloos in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours.grad, gloos.grad)


@pytest.mark.parametrize("views", [False, True])
def test_ranks_without_inputs_send_zeros_in_the_form_of_the_others(views: bool) -> None:
    run_ranks(uneven, 2, views)


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_ranks_sum_in_the_order_of_ranks(dtype: torch.dtype, world_size: int) -> None:
    """In fp32 for half precision, rounded once; the same bits on all ranks."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    parts = [gradients_of(rank, dtype, step=3) for rank in range(world_size)]
    of_parameters = zip(*parts, strict=True)
    scaled = [[(part.to(wide) / world_size).to(dtype) for part in of] for of in of_parameters]
    expected = [sum(part.to(wide) for part in of).to(dtype) for of in scaled]  # type: ignore[union-attr]
    for ours, _ in run_ranks(averages, world_size, dtype, "allreduce", {}):
        for a, b in zip(ours, expected, strict=True):
            # The reciprocal of 3 is not exact.
            torch.testing.assert_close(a, b, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-6)
            if world_size == 4:
                assert torch.equal(a, b)


def several_models(rank: int, world_size: int) -> None:
    """Under one backward, and in the other order on the other half of the ranks."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    whole = DistributedDataParallel(Many())
    half = DistributedDataParallel(Many(), process_group=halves[rank // 2])
    assert uses_host_memory(whole)
    assert uses_host_memory(half)
    for step in range(5):
        whole.zero_grad()
        half.zero_grad()
        own = gradients_of(rank, torch.float32, step)
        losses = [whole(own), half(own)]
        sum(losses if rank < 2 else losses[::-1]).backward()  # type: ignore[union-attr]
        of_ranks = [gradients_of(r, torch.float32, step) for r in range(4)]
        pair = of_ranks[rank // 2 * 2 : rank // 2 * 2 + 2]
        for model, ranks in ((whole, of_ranks), (half, pair)):
            for p, *parts in zip(model.parameters(), *ranks, strict=True):
                torch.testing.assert_close(p.grad, sum(parts) / len(parts))


def test_several_models_and_subgroups() -> None:
    run_ranks(several_models, 4)


def other_hooks(rank: int, world_size: int) -> None:
    """The memory serves hooks that send by other ways, too."""
    model = DistributedDataParallel(Many())
    handle = commhooks.register(model, "int8")
    for hook in ("int8", "bf16", "noop", "allreduce", "topk"):
        handle.replace(hook)
        for step in range(2):
            model.zero_grad()
            model(gradients_of(rank, torch.float32, step)).backward()
    handle.remove()
    model.zero_grad()
    model(gradients_of(rank, torch.float32)).backward()
    expected = [
        sum(of) / 2 for of in zip(*(gradients_of(r, torch.float32) for r in (0, 1)), strict=True)
    ]
    for p, average in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, average)


def test_hooks_in_python_and_native_ones_take_turns() -> None:
    run_ranks(other_hooks, 2)


# ----------------------------------------------------------------------- who overwrites what, when


class Overwriting(nn.Module):
    """Large enough that reading takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(300_000)) for _ in range(4))

    def forward(self, value: float) -> Tensor:
        return sum((p * value).sum() for p in self.parts)  # type: ignore[return-value]


@contextmanager
def slowed_down() -> Iterator[None]:
    """Stop this process again and again, anywhere, for a few milliseconds."""
    ours, theirs = os.pipe()
    process, stopper = os.getpid(), os.fork()
    if stopper == 0:
        os.close(theirs)
        while not select.select([ours], [], [], 0.003)[0]:
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.01)
            os.kill(process, signal.SIGCONT)
        os._exit(0)
    try:
        yield
    finally:
        os.close(theirs)
        os.waitpid(stopper, 0)
        os.close(ours)


def overwrite_at_once(
    rank: int, world_size: int, options: dict[str, Any], in_backward: bool, accumulate: bool
) -> None:
    model = DistributedDataParallel(Overwriting(), bucket_cap_mb=1, **options)
    assert uses_host_memory(model)
    parameters = list(model.parameters())
    seen: list[int] = []

    def check(indices: list[int], expected: float) -> None:
        for index in indices:
            gradient = parameters[index].grad
            assert gradient is not None
            assert torch.equal(gradient, torch.full_like(gradient, expected)), (rank, gradient)
            gradient.fill_(float("nan"))  # what a peer must not see
            seen.append(index)

    with slowed_down() if rank == world_size - 1 else nullcontext():
        for step in range(15):
            for p in parameters:
                if p.grad is None or not options["gradient_as_bucket_view"]:
                    p.grad = None
                else:
                    p.grad.zero_()
            values = [step + 2 * r for r in range(world_size)]
            expected = sum(values) / world_size
            if accumulate:
                with model.no_sync():
                    model(values[rank]).backward()
                expected *= 2
            seen.clear()
            if in_backward:
                model.reducer.set_observer(lambda indices, e=expected: check(indices, e))
            model(values[rank]).backward()
            if not in_backward:
                check(list(range(len(parameters))), expected)
            assert sorted(seen) == list(range(len(parameters)))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(
    ("in_backward", "accumulate"), [(False, False), (True, False), (False, True)]
)
def test_gradients_may_be_overwritten_at_once(
    views: bool, in_backward: bool, accumulate: bool
) -> None:
    """Peers read slices of a bucket after it has been averaged."""
    options = {"gradient_as_bucket_view": views}
    run_ranks(overwrite_at_once, 4, options, in_backward, accumulate)


# ------------------------------------------------------------------------------- who shares a host


def other_network(rank: int, world_size: int) -> bool:
    dist.barrier()  # connects Gloo
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newnet = 0x40000000
    with Path("/proc/self/ns/net").open() as before:
        if rank == 1:
            assert libc.unshare(clone_newnet) == 0
        try:
            return uses_host_memory(DistributedDataParallel(Many()))
        finally:
            libc.setns(before.fileno(), clone_newnet)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network namespace")
def test_ranks_with_networks_of_their_own_are_hosts_of_their_own() -> None:
    assert run_ranks(other_network, 2) == [False, False]


def wrong_addresses(rank: int, world_size: int) -> None:
    group = HostGroup()
    process, file, offset, nonce = group.address
    with pytest.raises(RuntimeError, match="is not rank 0"):
        group.connect({0: (process, file, offset, nonce + 1)})
    with pytest.raises(RuntimeError, match="No such file"):
        group.connect({0: (process, 10_000, offset, nonce)})


def test_memory_is_known_by_a_nonce() -> None:
    run_ranks(wrong_addresses, 2)


# ------------------------------------------------------------------------------- memory and trust


def shared_bytes(model: DistributedDataParallel) -> int:
    transport = model.reducer.transport
    assert isinstance(transport, HostGroup)
    return Path(f"/proc/self/fd/{transport.address[1]}").stat().st_blocks * 512


def memory_of_steps(rank: int, world_size: int, hook: str, options: dict[str, Any]) -> list[int]:
    empty = DistributedDataParallel(nn.Linear(1, 1))
    before = shared_bytes(empty)
    model = DistributedDataParallel(Overwriting(), bucket_cap_mb=1, **options)
    commhooks.register(model, hook)
    found = []
    for _ in range(4):
        model(1.0).backward()
        found.append(shared_bytes(model) - before)
    dist.barrier()
    commhooks.handle_of(model).remove()
    del model
    found.append(shared_bytes(empty) - before)
    return found


@pytest.mark.parametrize(
    ("hook", "options", "bytes_per_element"),
    [
        ("allreduce", {}, 4),
        ("allreduce", {"lazy_bucket_allocation": True}, 0),
        ("bf16", {}, 2),
        ("bf16", {"gradient_as_bucket_view": True}, 4),  # the views themselves
    ],
)
def test_memory_is_that_of_the_buckets_and_is_given_back(
    hook: str, options: dict[str, Any], bytes_per_element: int
) -> None:
    room = 64 << 10  # pages, and what ranks tell each other
    for *steps, after in run_ranks(memory_of_steps, 2, hook, options):
        for used in steps:
            assert abs(used - 4 * 300_000 * bytes_per_element) < room, steps
        assert after < room


def nothing_in_the_file_system(rank: int, world_size: int) -> list[str]:
    model = DistributedDataParallel(Overwriting())
    model(1.0).backward()
    transport = model.reducer.transport
    assert isinstance(transport, HostGroup)
    own = Path(f"/proc/self/fd/{transport.address[1]}").readlink()
    return [str(own), *(path.name for path in Path("/dev/shm").glob("*commhooks*"))]


def test_no_file_is_left_behind() -> None:
    """The memory has no name, so it is gone with the last process."""
    assert run_ranks(nothing_in_the_file_system, 2) == [["/memfd:commhooks (deleted)"]] * 2


def forked_child(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Overwriting(), gradient_as_bucket_view=True)
    model(rank).backward()
    child = os.fork()
    if child == 0:
        try:
            assert all(torch.equal(p.grad, torch.full_like(p, 0.5)) for p in model.parameters())  # type: ignore[arg-type]
            del model  # gives nothing back, and closes nothing
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    assert all(torch.equal(p.grad, torch.full_like(p, 0.5)) for p in model.parameters())  # type: ignore[arg-type]
    model.zero_grad()
    model(rank).backward()
    assert all(torch.equal(p.grad, torch.full_like(p, 0.5)) for p in model.parameters())  # type: ignore[arg-type]


def test_a_forked_process_reads_gradients_and_takes_nothing_with_it() -> None:
    run_ranks(forked_child, 2)


def moved(rank: int, world_size: int) -> None:
    models = [
        wrap(Many(), gradient_as_bucket_view=True) for wrap in (DistributedDataParallel, over_gloo)
    ]
    for step in range(5):
        for model in models:
            model(gradients_of(rank, torch.float32, step)).backward()  # added to those before
            if step == 2:
                model.module.share_memory()
    for ours, gloos in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours.grad, gloos.grad)


def test_gradients_may_be_moved_between_steps() -> None:
    run_ranks(moved, 2)


def patient(rank: int, world_size: int) -> float:
    """Take many small steps, in which a lost wake-up would cost a minute."""
    models = [
        DistributedDataParallel(Many(), bucket_cap_mb=0.01, gradient_as_bucket_view=views)
        for views in (False, True)
    ]
    for model in models:
        transport = model.reducer.transport
        assert isinstance(transport, HostGroup)
        transport.set_liveness_interval(timedelta(minutes=1))
    gradients = gradients_of(rank, torch.float32)
    start = time.monotonic()
    for _ in range(100):
        for model in models:
            model(gradients).backward()
            dist.barrier()  # nobody rings here
    return time.monotonic() - start


def test_no_wake_up_is_lost() -> None:
    assert max(run_ranks(patient, 3, timeout=100)) < 50


def fails_alone(rank: int, world_size: int) -> tuple[str, str]:
    """The first rank fails after its first bucket; the other one waits for the rest."""
    model = DistributedDataParallel(Overwriting(), bucket_cap_mb=1, broadcast_buffers=False)
    model(1.0).backward()
    model(1.0)  # rebuilds buckets
    model.reducer.abort()
    texts = []
    for attempt in range(2):
        loss = model(1.0)
        if rank == 0 and attempt == 0:
            list(model.parameters())[1].register_hook(lambda _: 1 / 0)
        try:
            loss.backward()
            texts.append("")
        except (ZeroDivisionError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        if rank == 0 and attempt == 0:
            list(model.parameters())[1]._backward_hooks.clear()
    return texts[0], texts[1]


def test_steps_that_do_not_match_are_an_error() -> None:
    """Rank 0 begins its next step while rank 1 waits in the one that failed."""
    (first, then), (waiting, _) = run_ranks(fails_alone, 2)
    assert "ZeroDivisionError" in first
    assert "Ranks average different buckets" in then + waiting


def fails_together(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Overwriting(), bucket_cap_mb=1)
    model(1.0).backward()
    parameter = list(model.parameters())[1]
    removable = parameter.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(1.0).backward()
    removable.remove()
    for value in (2.0, 3.0):
        model.zero_grad()
        model(value + rank).backward()
        for p in model.parameters():
            assert p.grad is not None
            assert torch.equal(p.grad, torch.full_like(p, value + 0.5))


def test_a_failed_step_starts_clean() -> None:
    run_ranks(fails_together, 2)


def fails_while_another_reads(rank: int, world_size: int) -> None:
    options = {"bucket_cap_mb": 1, "stable_buckets": True, "broadcast_buffers": False}
    model = DistributedDataParallel(Overwriting(), **options)
    model.require_manual_backward_finalization = True
    finished: list[int] = []

    def fail_at_the_end(indices: list[int]) -> None:
        finished.extend(indices)
        if len(finished) == 4:
            raise ZeroDivisionError

    def be_late(indices: list[int]) -> None:
        finished.extend(indices)
        if len(finished) == 1:
            time.sleep(0.5)  # the other rank packs its next step meanwhile

    model(1.0 + rank).backward()
    dist.barrier()
    model.reducer.set_observer(be_late if rank else fail_at_the_end)
    with nullcontext() if rank else pytest.raises(ZeroDivisionError):
        model.finalize_backward()
    model.reducer.set_observer(None)
    for expected in (1.5, 10.5):
        for p in model.parameters():
            assert torch.equal(p.grad, torch.full_like(p, expected))  # type: ignore[arg-type]
        model.zero_grad()
        model(10.0 + rank).backward()
        model.finalize_backward()


def test_a_failed_step_leaves_its_averages_to_the_others() -> None:
    run_ranks(fails_while_another_reads, 2)


def late_after_a_failure(rank: int, world_size: int, views: bool) -> str:
    """Rank 1 sums at once, and reads what rank 0 has summed only after rank 0 has given up."""
    model = DistributedDataParallel(Overwriting(), gradient_as_bucket_view=views)
    model(1.0 + rank).backward()  # rebuilds buckets
    processes: list[int] = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    dist.barrier()
    last_gradient = next(iter(model.parameters()))
    store = dist.distributed_c10d._get_default_store()
    has_given_up, has_read = f"has given up: {views}", f"has read: {views}"
    where = "backward"
    if rank == 1:
        model.require_manual_backward_finalization = True
        last_gradient.register_hook(lambda _: stop_when_it_waits(processes[0]))
    else:
        set_timeout(5)
    try:
        model(1.0 + rank).backward()
        if rank == 1:
            os.kill(processes[0], signal.SIGCONT)
            store.wait([has_given_up])
            where = "finalize_backward"
            model.finalize_backward()
    except RuntimeError as error:
        if rank == 0:
            store.set(has_given_up, "")
            store.wait([has_read])  # this process still lives
        return f"{where}: {error}"
    finally:
        store.set(has_read, "")
    return ""


def stop_when_it_waits(process: int) -> None:
    """Stop a process that waits for its peer: its main thread has slept for a tenth of a second."""
    seen = 0
    while seen < 10:
        time.sleep(0.01)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        seen = seen + 1 if state == "S" else 0
    os.kill(process, signal.SIGSTOP)


@pytest.mark.parametrize("views", [False, True])
def test_no_rank_returns_averages_of_a_peer_that_has_given_up(views: bool) -> None:
    """That peer drops its buckets, or packs its next gradients there."""
    first, second = run_ranks(late_after_a_failure, 2, views)
    assert "Timed out waiting 5000 ms for rank 1" in first
    assert re.match("finalize_backward: .*Connection closed by peer: rank 0", second)


def ways(rank: int, world_size: int) -> list[str]:
    model = DistributedDataParallel(Many())
    handle = commhooks.register(model, "allreduce")
    found = [model._get_ddp_logging_data()["transport"]]
    for hook in ("allreduce", "bf16", "int8", "noop"):
        handle.replace(hook)
        for _ in range(2):
            model(gradients_of(rank, torch.float32)).backward()
        found.append(handle.stats().transport)
        assert ("host memory" in str(handle.stats())) == (found[-1] == "host memory")
    return found


def ratio(rank: int, world_size: int, views: bool) -> float | None:
    model = DistributedDataParallel(Many(), gradient_as_bucket_view=views)
    handle = commhooks.register(model, "bf16")
    model(gradients_of(rank, torch.float32)).backward()
    return handle.stats().total.ratio


@pytest.mark.parametrize("views", [False, True])
def test_statistics_count_the_bytes_of_the_hook(views: bool) -> None:
    assert run_ranks(ratio, 2, views) == [2.0] * 2


def entries(rank: int, world_size: int) -> list[bool]:
    entry = Entry.of("allreduce")
    models = [entry.wrap(Many(), **options)[0] for options in ({}, {"host_memory": True})]
    return [uses_host_memory(model) for model in models]  # type: ignore[arg-type]


def test_ranks_of_a_comparison_stand_for_hosts() -> None:
    assert run_ranks(entries, 2) == [[False, True]] * 2


def test_statistics_and_logging_data_say_which_way_a_step_went() -> None:
    expected = ["host memory"] * 3 + ["process group"] * 2
    assert run_ranks(ways, 2) == [expected] * 2


def test_a_mean_needs_tensors_that_fit_its_result() -> None:
    with pytest.raises(RuntimeError, match="at least one tensor"):
        HostGroup.mean_of([], torch.zeros(4))
    with pytest.raises(RuntimeError, match="a result that is contiguous"):
        HostGroup.mean_of([torch.ones(4)] * 2, torch.zeros(8)[::2])
    with pytest.raises(RuntimeError, match="with the size and dtype of the result"):
        HostGroup.mean_of([torch.ones(3)], torch.zeros(4))
