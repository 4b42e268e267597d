"""Everything that works without extensions, in an installation without them: `make test-pure`."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hook_digests
from torch import nn

import commhooks
import reducer.fallback
from commhooks import fallback, native
from commhooks.extensions import EXTENSIONS, KERNELS
from commhooks.testing import check_hook

pytestmark = pytest.mark.skipif(
    KERNELS.is_compiled, reason="extensions are compiled: `make test-pure` runs these"
)
TESTS = Path(__file__).parents[1]


def command(*arguments: str, env: dict[str, str] | None = None) -> str:
    run = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"} | (env or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_nothing_compiled_is_loaded() -> None:
    assert native.CpuBlockCodec is fallback.CpuBlockCodec
    assert reducer.native.GradBucket is reducer.fallback.GradBucket
    assert not {extension.name for extension in EXTENSIONS} & sys.modules.keys()


def test_hooks_return_the_bits_of_the_compiled_extensions(run_ranks: Any) -> None:
    folders = [extension.folder for extension in EXTENSIONS]
    if not all(any(folder.glob("_C*.so")) for folder in folders):
        pytest.skip("the extensions are not compiled, so there is nothing to compare with")
    found = run_ranks(hook_digests.digests, 2)
    compiled = command("-m", "support.hook_digests", env={"COMMHOOKS_NO_EXTENSION": "0"})
    assert found == json.loads(compiled)


@pytest.mark.usefixtures("run_ranks")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allreduce", {}),
        ("int8", {}),
        ("topk", {"density": 0.1, "warmup_steps": 2}),
        ("powersgd", {"rank": 1, "min_compression_rate": 1.0, "start_step": 0}),
        ("gossip", {"average_every": 2}),
        ("skip_nonfinite", {"inner": "bf16"}),
    ],
)
def test_hooks_conform(name: str, options: dict[str, Any]) -> None:
    check_hook(functools.partial(commhooks.create, name, **options))


def test_our_wrapper_says_what_it_needs() -> None:
    with pytest.raises(commhooks.CommHookError, match=r"needs the extension reducer\._C") as caught:
        commhooks.DistributedDataParallel(nn.Linear(2, 2))
    assert "torch.nn.parallel.DistributedDataParallel, on which commhooks" in str(caught.value)
    assert "pip install --no-build-isolation" in str(caught.value)


def test_commands() -> None:
    pytest.importorskip("click")
    listed = command("-m", "commhooks", "list")
    assert "powersgd" in listed
    doctor = command("-m", "commhooks", "doctor")
    lines = {line.split()[0]: line for line in doctor.splitlines() if line.strip()}
    for extension in EXTENSIONS:
        assert lines[extension.name].split()[1] == "absent"


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def make_input() -> torch.Tensor:
    return torch.ones(4, 64)


def test_compare(tmp_path: Path) -> None:
    pytest.importorskip("click")
    model = ["--model", "pure.test_installation:make_model"]
    given = [*model, "--input", "pure.test_installation:make_input"]
    file = str(tmp_path / "found.json")
    hooks = ("--hooks", "int8", "--steps", "2", "--json", file)
    assert "int8" in command("-m", "commhooks", "compare", *given, *hooks)
    rows = json.loads(Path(file).read_text())["rows"]
    assert "int8" in {row["hook"] for row in rows}
