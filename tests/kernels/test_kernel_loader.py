"""Compilation of kernels with NVRTC, if it is installed, and the cache of machine code."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_compile.report import Usage, usages
from emulation import LocalSource

from commhooks import CommHookError
from commhooks.kernels import loader, nvrtc
from commhooks.kernels.source import DIRECTORY, SOURCES

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_90'
ptxas info    : Function properties for _Z1fPf
ptxas         .     0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compiling entry function '_Z1gPf' for 'sm_90'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 129 registers, used 0 barriers
"""

SUMS = LocalSource("broken.cu", ("sum_by_halves", "forgets_a_barrier"))


@pytest.fixture
def _has_nvrtc() -> None:
    try:
        nvrtc.nvrtc()
    except ImportError as error:
        pytest.skip(f"needs NVRTC: {error}")


def test_report_parses_the_output_of_ptxas():
    found = list(usages(LOG, {"_Z1fPf": "f"}))
    assert found == [Usage("f", 12, 12, 128), Usage("_Z1gPf", 129, 0, 0)]
    assert not any(usage.is_within_bounds for usage in found)
    assert Usage("h", 128, 0, 0).is_within_bounds


def test_every_cuda_source_is_checked():
    assert {source.path for source in SOURCES} == set(DIRECTORY.glob("*.cu"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_has_nvrtc")
def test_machine_code_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    cubin, name = loader._machine_code(SUMS, "sum_by_halves", "sm_90")
    assert cubin.read_bytes().startswith(b"\x7fELF")
    assert "sum_by_halves" in name
    monkeypatch.setattr(loader, "compile_source", None)  # from here on, compiling fails
    assert loader._machine_code(SUMS, "sum_by_halves", "sm_90") == (cubin, name)
    for other in ((SUMS, "forgets_a_barrier", "sm_90"), (SUMS, "sum_by_halves", "sm_80")):
        with pytest.raises(TypeError):
            loader._machine_code(*other)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_has_nvrtc")
def test_the_error_contains_the_messages_of_the_compiler():
    with pytest.raises(
        CommHookError, match=r"broken.cu for sm_90: NVRTC fails with(.|\n)*no_such_kernel"
    ):
        nvrtc.compile_source(SUMS, ["no_such_kernel"], "sm_90")


class RefusedLaunchError(Exception):
    """Stands for CuPy's CUDADriverError."""


def refuse(*_: object) -> None:
    raise RefusedLaunchError("CUDA_ERROR_INVALID_VALUE")


def test_a_refused_launch_is_a_hook_error(monkeypatch):
    chosen = []
    runtime = SimpleNamespace(getDevice=lambda: 0, setDevice=chosen.append)
    driver = SimpleNamespace(launchKernel=refuse, CUDADriverError=RefusedLaunchError)
    cuda = SimpleNamespace(runtime=runtime, driver=driver)
    monkeypatch.setattr(loader, "_check_cupy", lambda: None)
    monkeypatch.setattr(loader, "_cuda", lambda: cuda)
    monkeypatch.setattr(loader, "_function", lambda *_: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    with pytest.raises(CommHookError, match=r"cuda:1 refused to launch .*INVALID_VALUE"):
        loader.CudaBackend().launch(SUMS, "f", (1, 1, 1), 99999, 0, 0, 1)
    assert chosen == [1, 0]


def test_threads_write_the_same_file(tmp_path, monkeypatch):
    parts = set()
    monkeypatch.setattr(Path, "replace", lambda part, _: parts.add(part))
    threads = [
        threading.Thread(target=loader._write, args=(tmp_path / "code", b"1")) for _ in range(2)
    ]
    barrier = threading.Barrier(2)
    write_bytes = Path.write_bytes

    def write(path: Path, content: bytes) -> None:
        write_bytes(path, content)
        barrier.wait()

    monkeypatch.setattr(Path, "write_bytes", write)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(parts) == 2
