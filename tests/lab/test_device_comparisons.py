"""Comparisons and plans on a device, without one: a fake one, and figures that are known."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.comparisons import make_comparison
from support.fake_device import FakeDevice

from bench.measured_hooks import TORCHS
from commhooks import CommHookError, kernels
from commhooks.cluster import Device
from commhooks.costs.backends import NCCL
from commhooks.costs.network import ETHERNET_SHARE, Link, Network
from commhooks.costs.prediction import DryRuns
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace
from commhooks.hook.spec import hook_spec
from commhooks.lab.comparison import Comparison, ComparisonError, compare
from commhooks.lab.comparison.compare import check_kernels, check_limits
from commhooks.lab.machine import memory_peak
from commhooks.lab.planning import measure_groups
from commhooks.lab.simulation import Job, Study

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


def test_memory_of_the_device_is_limited() -> None:
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(10**10, 10**11)),
    ):
        check_limits(2, 10**8, CUDA)
        with pytest.raises(ComparisonError, match=r"2 ranks on one device need about 20\.0 GB"):
            check_limits(2, 10**9, CUDA)


def test_hooks_that_need_cupy_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_cupy = mock.Mock(**{"require.side_effect": CommHookError("they need CuPy")})
    monkeypatch.setitem(kernels.BACKENDS, "cuda", without_cupy)
    check_kernels(map(hook_spec, ("allreduce", "bf16", "powersgd")), CUDA)
    check_kernels([hook_spec("int8")], Device("cpu"))
    for hook in ("int8", "schedule:stages=[[0,'allreduce'],[5,'topk']]".replace("'", '"')):
        with pytest.raises(CommHookError, match="need CuPy"):
            check_kernels([hook_spec(hook)], CUDA)


def test_the_peak_is_that_of_torch_on_the_device() -> None:
    with mock.patch.multiple(
        torch.cuda,
        reset_peak_memory_stats=mock.DEFAULT,
        memory_allocated=lambda: 100,
        max_memory_allocated=lambda: 350,
    ) as patched:
        peak = memory_peak(CUDA)
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
