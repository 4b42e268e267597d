"""Processes that have used hooks end cleanly: threads of the runner neither hang nor crash them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODES = ("used", "failed", "left", "forked")  # in "used", rank 0 destroys its process group
SCRIPT = """
import os
import sys
import torch._dynamo  # backward imports it: once, rather than in each process
import torch.distributed as dist
from test_ended_processes import MODES
from test_threaded_runner import Fragile, backward, make_model
import commhooks


def run(rank, store, mode):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = make_model(False, buckets=2)
    hook = Fragile()
    commhooks.register(model, hook)
    if mode == "forked" and rank == 0:
        child = os.fork()
        if child == 0:
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
    for step in range(2):
        backward(model, rank, step)
    if mode == "failed":
        hook.where = (0, 1) if rank == 0 else None
        try:
            backward(model, rank, 1)
        except commhooks.CommHookError:
            pass
    if mode == "used" and rank == 0:
        dist.destroy_process_group()
    if mode == "left" and rank == 0:
        try:
            backward(model, rank, 1)
        except commhooks.CommHookError as error:
            assert "a peer failed, left" in str(error), error
        else:
            raise AssertionError("no error")
    print("done", flush=True)
    keep.append((model, hook))  # until the interpreter ends


keep = []
pids = {}
for mode in MODES:
    for rank in range(2):
        pids[mode, rank] = os.fork()
        if pids[mode, rank] == 0:
            for stream, suffix in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{mode}-{rank}.{suffix}", os.O_WRONLY | os.O_CREAT), stream)
            run(rank, os.path.abspath(mode), mode)
            sys.exit()
for (mode, rank), pid in pids.items():
    print(mode, rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture(scope="module")
def ended_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run SCRIPT, which forks two ranks per mode after one import; where, and its output."""
    folder = tmp_path_factory.mktemp("ended")
    path = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OPENBLAS_NUM_THREADS": "1",  # there are no threads to lose by forking
    }
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return folder, output


@pytest.mark.parametrize("mode", MODES)
def test_processes_end_cleanly(ended_processes: tuple[Path, str], mode: str) -> None:
    folder, output = ended_processes
    for rank in range(2):
        errors = (folder / f"{mode}-{rank}.err").read_text()
        assert f"{mode} {rank} 0\n" in output, errors
        assert (folder / f"{mode}-{rank}.out").read_text() == "done\n", errors
