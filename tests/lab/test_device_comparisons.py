"""Comparisons and plans on a device, without one: a fake one, and figures that are known."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.comparisons import make_comparison
from support.fake_device import FakeDevice
from torch import Tensor

import commhooks
from bench.measured_hooks import TORCHS
from commhooks import CommHookError, kernels
from commhooks.cluster import CPU, Device
from commhooks.costs.backends import NCCL
from commhooks.costs.network import ETHERNET_SHARE, Link, Network
from commhooks.costs.prediction import DryRuns
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace
from commhooks.hook.spec import HookLike, hook_spec
from commhooks.lab.comparison import Comparison, compare
from commhooks.lab.machine import LimitError, MemoryPeak, ModelSize, check_limits
from commhooks.lab.planning import measure_groups
from commhooks.lab.simulation import Job, Study, measure
from commhooks.lab.simulation.dry_run import check_kernels

HOOKS = ["allreduce", "int8", "topk:warmup_steps=0"]
CUDA = Device("cuda")


@pytest.fixture(scope="module")
def shared() -> Comparison:
    return compare(
        "support.compared:net",
        HOOKS,
        device=FakeDevice(),
        train="support.compared:train",
        links=[1e8],
        measure_links=False,
        steps=2,
        train_steps=2,
    )


def test_a_comparison_on_a_shared_device(shared: Comparison) -> None:
    assert shared.failures == ()
    assert shared.hooks == ["bare", "torch", "bf16", *HOOKS]
    assert str(shared).startswith("support.compared:net, 2 ranks on 1 x fake device, ")
    assert shared.machine["device"] == "1 x fake device"
    assert shared.alone_seconds is not None
    assert 0 < shared.alone_seconds < 1
    [note] = [note for note in shared.notes if "take turns" in note]
    assert note.startswith("2 ranks share 1 x fake device")
    for hook in HOOKS:  # their kernels run, and return what those of the CPU return
        assert shared.row(hook).validation_loss is not None
        assert shared.row(hook).break_even_bits_per_second is not None


def test_verdicts_leave_out_what_ranks_wait_for_each_other() -> None:
    """A step of 0.1 s of each of ten ranks on one device, of which bf16 saves 8 ms."""
    found = make_comparison()
    rows = [replace(row, step_seconds=row.step_seconds + 0.9) for row in found.rows]
    found = replace(found, rows=tuple(rows))
    assert found.verdicts()["loopback"].startswith("No hook helps")
    text = replace(found, alone_seconds=0.01).verdicts()["loopback"]
    assert text.startswith("Use powersgd:rank=4,start_step=0, 1.8 times as fast as bf16")


@pytest.mark.exhaustive  # the kernels of all hooks are emulated, in 30 seconds
def test_a_plan_on_a_fake_device() -> None:
    job = Job("support.small_models:make", device=FakeDevice())
    specs = [hook_spec(name) for name in ("allreduce", "int8")]
    found = measure_groups(job, specs, ["@1d"], 4)
    assert found.reasons == {}
    assert found.alone_seconds > 0
    assert 0 < found.error_of("int8") < 0.1


def test_no_device_is_the_cpu_in_tests() -> None:
    """Also where torch finds a device: tests/conftest.py says so to all processes."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        assert Device.choose(None) == CPU


@dataclass
class Launching(commhooks.CommHook):
    """Needs kernels of its own, and keeps nothing."""

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        for parameter in parameters.values():
            kernels.require(parameter.device)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        return await comm.all_reduce(bucket.buffer())


def plan_groups(hooks: Sequence[HookLike], device: Device) -> None:
    measure_groups(Job(MODEL, device=device), [hook_spec(each) for each in hooks], [], 4)


def simulate(hooks: Sequence[HookLike], device: Device) -> None:
    measure(Job(MODEL, device=device), hooks, [4])


def compare_hooks(hooks: Sequence[HookLike], device: Device) -> None:
    compare(MODEL, hooks, device=device)


MODEL = "support.compared:net"
COMMANDS = pytest.mark.parametrize("command", [compare_hooks, plan_groups, simulate])


@pytest.fixture
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commhooks.cluster.ranks.RankPool", None)


@COMMANDS
@pytest.mark.usefixtures("_nothing_starts")
def test_too_little_memory_of_the_device_is_refused(command: Any) -> None:
    sizes = "need about 4 GB, and 3.9 GB are free: for each 2 GB of a process, 74.5 kB of paramete"
    with pytest.raises(LimitError, match=f"^2 ranks that share a device {re.escape(sizes)}"):
        command(["allreduce"], FakeDevice(memory=3_900_000_000))


@COMMANDS
@pytest.mark.usefixtures("_nothing_starts")
def test_hooks_that_need_cupy_are_refused(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.BACKENDS, "cpu", WITHOUT_CUPY)
    hooks = ["allreduce", "powersgd", "int8", Launching, STAGES]
    with pytest.raises(CommHookError) as caught:
        command(hooks, FakeDevice())
    names = f"int8, {__name__}:Launching, schedule:"
    assert str(caught.value).startswith(names), caught.value
    assert str(caught.value).endswith("they need CuPy; or measure on the device 'cpu'")


WITHOUT_CUPY = mock.Mock(**{"require.side_effect": CommHookError("they need CuPy")})
STAGES = 'schedule:stages=[[0,"allreduce"],[5,"topk"]]'


def test_hooks_that_need_no_kernels_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults of ``auto`` that cannot run are no candidates, unless it was given them."""
    monkeypatch.setitem(kernels.BACKENDS, "cuda", WITHOUT_CUPY)
    exact = ("allreduce", "powersgd", "auto:error=0.1", "hierarchical:ranks_per_node=1", "diloco")
    check_kernels(map(hook_spec, exact), CUDA)
    check_kernels([hook_spec("int8")], Device("cpu"))
    for hook in (
        "auto:error=int4",
        'auto:error=0.1,candidates=["int8"]',
        "hierarchical:inner=int8,ranks_per_node=1",
        "powersgd:error_dtype=bfloat16",
        "error_feedback:error_dtype=bfloat16",
    ):
        with pytest.raises(CommHookError, match="need CuPy"):
            check_kernels([hook_spec(hook)], CUDA)


def test_memory_of_a_device_of_ones_own_is_limited() -> None:
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(11 * 10**9, 10**11)),
    ):
        check_limits(2, ModelSize(10**9, 10**9, 1e-7), CUDA)
        with pytest.raises(
            LimitError, match=r"^each rank, on its own device, needs about 11\.9 GB"
        ):
            check_limits(2, ModelSize(11 * 10**8, 11 * 10**8, 1e-7), CUDA)


def test_the_peak_is_that_of_torch_on_the_device() -> None:
    with mock.patch.multiple(
        torch.cuda,
        reset_peak_memory_stats=mock.DEFAULT,
        memory_allocated=lambda: 100,
        max_memory_allocated=lambda: 350,
    ) as patched:
        peak = MemoryPeak(CUDA)
        peak.begin()
        assert peak.nbytes() == 250
        assert patched["reset_peak_memory_stats"].call_count == 2


def test_a_link_that_is_faster_than_what_was_measured_saves_time() -> None:
    """Over loopback, sockets of NCCL have a rate, which a prediction takes away again."""
    sent = Collective("all_reduce", 1e9, Members(1, spans_nodes=True))
    trace = StepTrace((BucketTrace(10**9, 0.01, 0.0, (0.0, 0.0), (sent,)),), 0.01, is_native=False)
    runs = DryRuns({2: [(1.0, trace)]}, 1)
    network = Network(2, Link(1e9), Link(1e9))
    seconds = {"allreduce": 1.0}
    study = Study({"allreduce": runs}, network, NCCL(), loopback_seconds=seconds)
    study = replace(study, loopback=Link(1e10, payload_share=1.0))
    sent_in = 8e9 / ETHERNET_SHARE  # all of it, by each of two ranks
    for rate in (1e9, 1e10, 2e10):
        added = study.step_seconds("allreduce", rate) - 1.0
        assert added == pytest.approx(sent_in / rate - 8e9 / 1e10, abs=0.02)


def test_other_ways_to_average_take_part() -> None:
    entry = TORCHS["torch allreduce"]
    found = compare("support.compared:net", [entry, "bf16"], steps=2, device=FakeDevice())
    assert found.hooks == ["bare", "torch", "torch allreduce", "bf16"]
    assert found.row("torch allreduce").error == pytest.approx(0, abs=1e-6)
    assert found.row("torch allreduce").break_even_bits_per_second is None
