"""What a hook sends goes through NCCL even on one rank, if a test wants it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.conforming_hooks import CASES
from support.several_ranks import DTYPES, PATIENCE
from torch import Tensor

import commhooks
from commhooks import Communicator
from commhooks.comm.communicator import PendingCollective
from commhooks.runtime import stream_runner
from commhooks.testing import run_ranks
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters


def collectives(comm: Communicator, given: Tensor) -> dict[str, PendingCollective]:
    """Every collective of a communicator, none of which changes a number on one rank."""
    reduced = {op: comm.all_reduce(given.clone(), op) for op in ("sum", "min", "max", "product")}
    return reduced | {
        "all_gather": comm.all_gather(given),
        "all_to_all": comm.all_to_all(given),
        "reduce_scatter": comm.reduce_scatter(given),
        "broadcast": comm.broadcast(given.clone()),
        "sendrecv": comm.sendrecv(given, 0, 0),
        "push": comm.push(given, 0, [0]),
    }


def sends_to_itself(rank: int, size: int, device: str, dtype: torch.dtype, numel: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    given = (torch.arange(numel, device=device) % 2).to(dtype)
    for name, pending in collectives(Communicator(group, step=0, key="key"), given).items():
        assert pending.result is not None
        if name in ("all_gather", "all_to_all", "reduce_scatter", "sendrecv", "push"):
            pending.result.fill_(1)  # on one rank a communicator has copied it already
        pending.is_awaited = True
        pending.run(group)
        assert torch.equal(pending.result.view(-1), given), name


@pytest.mark.parametrize("numel", [0, 1, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_through_nccl(dtype: torch.dtype, numel: int) -> None:
    run_ranks(sends_to_itself, 1, "cuda", dtype, numel, backend="nccl", timeout=PATIENCE)


def trains_alike(rank: int, size: int, device: str, name: str, options: dict[str, Any]) -> None:
    """The results of some steps are the same, whether the collectives of one rank are sent."""
    parameters = probe_parameters(device=device)
    results: list[list[dict[str, Tensor]]] = []
    for sends in (False, True):
        stream_runner.SENDS_ALONE = sends
        trainer = Trainer(commhooks.create(name, **options), parameters, stable_buckets=True)
        drawn = [draw_gradients(parameters, step) for step in range(5)]
        results.append([trainer.step(gradients) for gradients in drawn])
        trainer.handle.remove()
    assert same_bits(*results)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_hooks_that_send_on_one_rank(name: str, options: dict[str, Any]) -> None:
    run_ranks(trains_alike, 1, "cuda", name, options, backend="nccl", timeout=PATIENCE)


def races(rank: int, size: int) -> bool:
    from torch.cuda._sanitizer import CUDASanitizerErrors  # which traces the device from then on

    numbers = torch.zeros(1000, device="cuda")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            numbers.add_(1)
    except CUDASanitizerErrors:
        return True
    return False


@pytest.mark.skipif("TORCH_CUDA_SANITIZER" not in os.environ, reason="no TORCH_CUDA_SANITIZER")
def test_torchs_sanitizer_watches_the_ranks() -> None:
    assert run_ranks(races, 1, backend="nccl", timeout=PATIENCE) == [True]


def test_the_example_trains_and_resumes(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    command = [sys.executable, str(script), "--hook", "int8", "--steps", "8", "--resume"]
    command += ["--checkpoint-dir", str(tmp_path), "--checkpoint-every", "4"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    for begins in ("step 8", "resumed after step 4"):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert begins in run.stdout
        shutil.rmtree(tmp_path / "step-00000008")
