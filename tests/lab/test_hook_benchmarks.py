"""The fixture ``hook_benchmark``, in runs of pytest of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.links import needs_links

from commhooks.cluster.links import unavailable

HOOKS = '''
import os
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import commhooks


def net():
    return nn.Linear(64, 64)


def batch():
    return torch.randn(4, 64)


@commhooks.register_hook("sleeping")
@dataclass
class Sleeping(commhooks.CommHook):
    """Sleep on the last rank, then average."""

    lossless = True
    seconds: float = 0.3
    factor: float = 1.0

    async def reduce(self, bucket, comm):
        if comm.rank == comm.size - 1:
            time.sleep(self.seconds * float(os.environ.get("SLOWER", 1)))
        return await comm.all_reduce(bucket.buffer().mul_(self.factor / comm.size))


@commhooks.register_hook("late")
@dataclass
class Late(commhooks.CommHook):
    """Fail in the warm-up of timed steps."""

    async def reduce(self, bucket, comm):
        if bucket.step < 100_000:
            raise ValueError("too early")
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


PLACE = {"model": net, "batch": batch, "steps": 3}
'''
SLEEPING = """
def test_sleeping(hook_benchmark):
    hook_benchmark("sleeping", **PLACE)
"""
ON_CUDA = """
def test_on_cuda(hook_benchmark):
    hook_benchmark("allreduce", device="cuda", **PLACE)
"""
OTHERS = """
def test_averaging(hook_benchmark):
    assert hook_benchmark("allreduce", **PLACE).error < 1e-6


def test_wrong(hook_benchmark):
    hook_benchmark("sleeping", seconds=0.0, factor=2.0, **PLACE)


def test_wrong_again(hook_benchmark):
    hook_benchmark("sleeping", seconds=0.0, factor=2.0, **PLACE)


def test_late(hook_benchmark):
    hook_benchmark("late", **PLACE)


def test_torch(hook_benchmark):
    with pytest.raises(commhooks.CommHookError, match="no options beside 'torch', found {'rank'"):
        hook_benchmark("torch", rank=4, **PLACE)
    hook_benchmark("torch", **PLACE)
    with pytest.raises(commhooks.CommHookError, match="hook 'guard' needs the option 'max_error'"):
        hook_benchmark(commhooks.algorithms.Guard, inner="int8", **PLACE)


def test_quantized(hook_benchmark):
    hook_benchmark({"name": "int8"}, **PLACE)


def large_batch():
    return torch.randn(8, 64)


def test_with_another_batch(hook_benchmark):
    hook_benchmark("bf16", **PLACE | {"batch": large_batch})
"""
NEXT = """
def test_next():
    pass
"""
LINK = """
def test_over_a_link(hook_benchmark):
    hook_benchmark("bf16", link="100mbit", **PLACE)


def test_on_one_host(hook_benchmark):
    hook_benchmark("bf16", link="1mbit", ranks_per_host=2, **PLACE)
"""


# In a worker of xdist, pytest-benchmark is disabled.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}


def run(folder: Path, text: str, *arguments: str, **environment: str) -> tuple[int, str]:
    (folder / "test_hooks.py").write_text(text)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_hooks.py", *arguments],
        cwd=folder,
        env={**ENVIRONMENT, "COLUMNS": "200", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    return result.returncode, result.stdout


def results(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "found.json").read_text())["benchmarks"]
    return {each["name"]: each for each in found}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Run hooks of all kinds; return the output and the results."""
    folder = tmp_path_factory.mktemp("session")
    text = HOOKS + SLEEPING + OTHERS + (LINK if unavailable() is None else "")
    (folder / "test_next.py").write_text(NEXT)
    code, output = run(folder, text, "test_next.py", "--benchmark-json=found.json")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    return output, results(folder)


def test_times_are_those_of_the_slowest_rank(session: tuple[str, dict[str, Any]]) -> None:
    """The dispatch of a step to processes is not timed, so that it cannot change the order."""
    _, found = session
    sleeping = found["test_sleeping"]
    assert sleeping["stats"]["rounds"] == len(sleeping["stats"]["data"]) == 3
    assert 0.3 <= sleeping["stats"]["min"] < 3
    for other in ("test_averaging", "test_torch", "test_quantized"):
        assert found[other]["group"] == sleeping["group"]
        assert found[other]["stats"]["min"] < sleeping["stats"]["min"]


def test_other_figures_are_in_extra_info(session: tuple[str, dict[str, Any]]) -> None:
    _, found = session
    info = found["test_quantized"]["extra_info"]
    assert info["hook"] == "int8"
    assert info["ratio"] > 2
    assert 0 < info["error"] < 0.1
    assert info["gradient_bytes"] == 4 * (64 * 64 + 64)
    assert info["peak_bytes"] > 0
    assert info["step_seconds"]["torch"] == found["test_torch"]["stats"]["median"]
    assert 0 < info["step_seconds"]["noop"] < found["test_sleeping"]["stats"]["min"]
    assert info["backward_seconds"]["int8"] < info["step_seconds"]["int8"]
    assert info["floor_seconds"] is None


def test_the_baselines_are_in_the_table(session: tuple[str, dict[str, Any]]) -> None:
    output, _ = session
    table = output.partition("communication hooks")[2]
    for name in ("bare", "torch", "noop", "sleeping", "int8"):
        assert name in table


def test_each_batch_has_a_table(session: tuple[str, dict[str, Any]]) -> None:
    output, found = session
    assert found["test_with_another_batch"]["group"] != found["test_torch"]["group"]
    for batch in ("batch", "large_batch"):
        assert f"communication hooks: test_hooks: net, {batch}, 2 ranks, loopback" in output


def test_a_wrong_hook_fails_and_is_not_timed(session: tuple[str, dict[str, Any]]) -> None:
    output, found = session
    assert not {"test_wrong", "test_wrong_again"} & set(found)
    assert "2 failed" in output
    assert "expected the exact mean to within rounding" in output


def test_a_hook_that_fails_later_is_an_error(session: tuple[str, dict[str, Any]]) -> None:
    """The others have their times."""
    output, found = session
    assert "test_late" not in found
    assert "1 error" in output  # not in the next module as well
    assert "late (loopback): " in output
    assert "ValueError: too early" in output


@needs_links
def test_over_a_link(session: tuple[str, dict[str, Any]]) -> None:
    _, found = session
    over_link = found["test_over_a_link"]
    assert over_link["group"] != found["test_torch"]["group"]
    assert over_link["extra_info"]["floor_seconds"] > 0
    on_one_host = found["test_on_one_host"]
    assert "2 ranks, 2 on each host, 1 Mbit/s" in on_one_host["group"]
    assert on_one_host["stats"]["min"] < on_one_host["extra_info"]["floor_seconds"]


LISTS = """
def test_lists(hook_benchmark):
    wrapper = {"bucket_cap_mb_list": [0.001, 25]}
    assert hook_benchmark("allreduce", wrapper=wrapper, **PLACE).error < 1e-6
"""


def test_options_of_the_wrapper_may_be_lists(tmp_path: Path) -> None:
    code, output = run(tmp_path, HOOKS + LISTS, "--benchmark-disable")
    assert code == pytest.ExitCode.OK, output


SLOW = """
@pytest.mark.timeout(8)
def test_last(hook_benchmark):
    hook_benchmark("allreduce", **PLACE)
"""


@pytest.mark.exhaustive  # takes the time-out
def test_the_timeout_of_a_test_is_not_that_of_timing_all_hooks(tmp_path: Path) -> None:
    text = HOOKS + SLEEPING + SLOW
    code, output = run(tmp_path, text, "--benchmark-json=found.json", SLOWER="6")
    assert code == pytest.ExitCode.OK, output
    assert results(tmp_path)["test_sleeping"]["stats"]["total"] > 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", ["--benchmark-disable", "-n1"])
def test_only_verified(tmp_path: Path, option: str) -> None:
    """pytest-benchmark times nothing with xdist either, and says so."""
    code, output = run(tmp_path, HOOKS + SLEEPING, "--hook-world-size=3", option)
    assert code == pytest.ExitCode.OK, output
    assert "1 passed" in output
    assert "communication hooks" not in output


def test_an_option_for_no_device(tmp_path: Path) -> None:
    code, output = run(tmp_path, HOOKS + SLEEPING, "--hook-device=cuda:1")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "error: argument --hook-device: invalid choice: 'cuda:1' (choose from" in output


@pytest.mark.exhaustive
def test_the_option_for_a_device_replaces_that_of_tests(tmp_path: Path) -> None:
    """The first run needs a device that is not there; the second one names another in its place."""
    text = HOOKS + ON_CUDA
    code, output = run(tmp_path, text, "--hook-device=cuda", CUDA_VISIBLE_DEVICES="")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "DeviceError: expected a CUDA device, and torch" in output
    code, output = run(tmp_path, text, "--hook-device=cpu", "--benchmark-disable")
    assert code == pytest.ExitCode.OK, output


@pytest.mark.exhaustive
def test_nothing_is_timed_after_a_failure_that_ends_the_session(tmp_path: Path) -> None:
    text = HOOKS + SLEEPING + "\n\ndef test_failing():\n    assert False\n" + OTHERS
    code, output = run(tmp_path, text, "-x", "--benchmark-json=found.json")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "communication hooks" not in output


@pytest.mark.exhaustive
def test_a_regression_is_found(tmp_path: Path) -> None:
    arguments = ("--hook-steps=5", "--benchmark-storage=saved", "--import-mode=importlib")
    code, output = run(tmp_path, HOOKS + SLEEPING, *arguments, "--benchmark-save=before")
    assert code == pytest.ExitCode.OK, output
    arguments = (*arguments, "--benchmark-compare", "--benchmark-compare-fail=min:50%")
    code, output = run(tmp_path, HOOKS + SLEEPING, *arguments)
    assert code == pytest.ExitCode.OK, output
    code, output = run(tmp_path, HOOKS + SLEEPING, *arguments, SLOWER="2.5")
    assert code != pytest.ExitCode.OK, output
    assert "Performance has regressed" in output


@pytest.mark.exhaustive
def test_a_link_that_cannot_be_made_skips(tmp_path: Path) -> None:
    code, output = run(tmp_path, HOOKS + LINK, "-rs", PATH="")
    assert code == pytest.ExitCode.OK, output
    assert "shaped links need" in output


def test_other_suites_do_not_import_torch(tmp_path: Path) -> None:
    text = """
import sys


def test_modules(pytestconfig):
    assert pytestconfig.getoption("hook_steps") is None
    assert "torch" not in sys.modules
    assert "commhooks" not in sys.modules
"""
    code, output = run(tmp_path, text)
    assert code == pytest.ExitCode.OK, output
