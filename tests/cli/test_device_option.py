"""``--device`` of compare, plan and simulate."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("click")
from click.testing import CliRunner
from support.fake_device import FakeDevice

from commhooks import CommHookError
from commhooks.cli.commands import commands
from commhooks.cluster import CPU, Device

CLUSTER = ("--world-size", "4", "--link", "1gbit")
COMMANDS = {
    "compare": ("--hooks", "allreduce"),
    "plan": ("--candidates", "allreduce", "--error", "0.1", *CLUSTER),
    "simulate": ("--hooks", "allreduce", *CLUSTER),
}
MEASURING = {"compare": "compare_hooks", "plan": "measure_groups", "simulate": "measure"}
every_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commhooks.cluster.ranks.RankPool", None)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


def run(command: str, *options: str, status: int) -> str:
    arguments = [command, "--model", "support.compared:net", *COMMANDS[command], *options]
    result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output.strip()  # the progress bar ends with a line


@every_command
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tpu", "expected the device 'cpu' or 'cuda', found 'tpu'"),
        ("", "expected the device 'cpu' or 'cuda', found ''"),
        ("cuda:1", "expected the device 'cpu' or 'cuda', found 'cuda:1'; CUDA_VISIBLE_DEVICES ch"),
        ("cuda", f"expected a CUDA device, and torch {torch.__version__} finds none; use 'cpu'"),
    ],
    ids=["other", "empty", "index", "no CUDA"],
)
def test_devices_that_do_not_exist(
    command: str, name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = run(command, "--device", name, status=2)
    assert f"Error: Invalid value for '--device': {says}" in " ".join(output.split())


@every_command
def test_the_device_of_the_environment_may_be_wrong(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMHOOKS_DEVICE", "tpu")
    output = run(command, status=1)
    assert output == "Error: expected the device 'cpu' or 'cuda' in COMMHOOKS_DEVICE, found 'tpu'"


@every_command
@pytest.mark.parametrize(
    ("options", "device"),
    [(("--device", "cuda"), Device("cuda")), (("--device", "cpu"), CPU), ((), Device("cuda"))],
)
def test_the_device_is_used(
    command: str, options: tuple[str, ...], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measure(*arguments: Any, **options: Any) -> None:
        seen.append(options["device"] if command == "compare" else arguments[0].device)
        raise CommHookError("seen")

    monkeypatch.setattr(f"commhooks.cli.{command}.{MEASURING[command]}", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("COMMHOOKS_DEVICE")
    assert run(command, *options, status=1) == "Error: seen"
    assert seen == [device]


@every_command
def test_a_refusal_is_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "choose", lambda _: FakeDevice(memory=10**9))
    output = run(command, status=1)
    assert output.startswith("Error: 2 ranks that share a device need about 4 GB, and 1 GB are ")
    assert "\n" not in output
